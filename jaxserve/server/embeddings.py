"""The routes that answer with vectors of whole texts, or with how near two of them are."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Sequence
from contextlib import aclosing
from math import sumprod
from typing import Any

from litestar import Request, Response, post

from jaxserve.engine.admission import make_requests
from jaxserve.engine.messages import DEADLINE
from jaxserve.request import EngineRequest, FinishReason, RequestError, SamplingParams
from jaxserve.server import schemas, validate
from jaxserve.server.context import ServerContext, context_of, new_id
from jaxserve.server.errors import ApiError, GenerationAbortedError, GenerationError
from jaxserve.server.generation import unless_disconnected
from jaxserve.server.openai import json_answer, off_loop, read_body, serving

MAX_INPUTS = 2048
"""As OpenAI has it."""
NOTHING_GENERATED = SamplingParams(max_tokens=0)


@post("/v1/embeddings", status_code=200, guards=[serving])
async def embeddings(request: Request[Any, Any, Any]) -> Response[bytes]:
    context = context_of(request)
    body = await read_body(request, schemas.EmbeddingRequest, context)
    size = context.client.info.hidden_size
    if body.dimensions not in (None, size):
        raise RequestError(f"dimensions must be {size}, as this model has it.", param="dimensions")
    requests = await off_loop(request, lambda: _requests(context, new_id("embd"), body, "input", body.input))
    vectors = await unless_disconnected(request, _embed(context, requests))
    data = [
        schemas.Embedding(index=index, embedding=_encoded(vector, body.encoding_format))
        for index, vector in enumerate(vectors)
    ]
    return json_answer(schemas.EmbeddingList(data=data, model=context.model_name, usage=_usage(requests)))


@post("/v1/score", status_code=200, guards=[serving])
async def score(request: Request[Any, Any, Any]) -> Response[bytes]:
    context = context_of(request)
    body = await read_body(request, schemas.ScoreRequest, context)
    texts_1, texts_2 = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(texts_1) not in (1, len(texts_2)):
        raise RequestError(
            f"text_2 must hold as many texts as text_1, unless that is a single one; they hold {len(texts_2)} and"
            f" {len(texts_1)}.",
            param="text_2",
        )
    score_id = new_id("score")
    requests = await off_loop(
        request,
        lambda: (
            _requests(context, score_id, body, "text_1", texts_1)
            + _requests(context, score_id, body, "text_2", texts_2)
        ),
    )
    vectors = [_numbers(raw) for raw in await unless_disconnected(request, _embed(context, requests))]
    first, second = vectors[: len(texts_1)], vectors[len(texts_1) :]
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    # They have length 1: the product is the cosine.
    data = [schemas.Score(index=index, score=sumprod(*pair)) for index, pair in enumerate(pairs)]
    answer = schemas.ScoreList(
        id=score_id, created=int(time.time()), model=context.model_name, data=data, usage=_usage(requests)
    )
    return json_answer(answer)


def _requests(
    context: ServerContext,
    call_id: str,
    body: schemas.TextsRequest,
    field: str,
    texts: str | list[str] | list[str | int | list[int]],
) -> list[EngineRequest]:
    """A request of the engine for each text of a field; raises ``RequestError``."""
    prompts = validate.prompts_of(texts, field, context.tokenizer, special=body.add_special_tokens is not False)
    if len(prompts) > MAX_INPUTS:
        raise RequestError(f"{field} may hold at most {MAX_INPUTS} texts, got {len(prompts)}.", param=field)
    info = context.client.info
    prompts = validate.truncate(prompts, body.truncate_prompt_tokens, NOTHING_GENERATED, info)
    try:
        return [
            make_requests(
                f"{call_id}-{field}-{number}",
                prompt.token_ids,
                NOTHING_GENERATED,
                info,
                group=call_id,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                deadline=context.deadline(None),
                pooling=context.config.pooling,
            )[0]
            for number, prompt in enumerate(prompts)
        ]
    except RequestError as error:
        if error.param in ("prompt", "messages"):  # as the door calls it
            error.param = field
        raise


async def _embed(context: ServerContext, requests: Sequence[EngineRequest]) -> list[bytes]:
    """Vectors of length 1 in the order of the requests, float32 and little-endian."""
    vectors: dict[str, bytes] = {}
    async with aclosing(context.client.generate(requests)) as batches:
        async for outputs in batches:
            for output in outputs:
                if output.stop_reason == DEADLINE:
                    raise ApiError(503, "The server did not compute this within its time limit.", code="deadline")
                if output.finish_reason == FinishReason.ABORT:
                    raise GenerationAbortedError("The request was aborted.")
                if output.embedding is None:
                    raise GenerationError(output.error or "The engine gave no reason.")
                vectors[output.request_id] = output.embedding
    return [vectors[request.request_id] for request in requests]


def _encoded(vector: bytes, encoding_format: str | None) -> str | tuple[float, ...]:
    return base64.b64encode(vector).decode() if encoding_format == "base64" else _numbers(vector)


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _usage(requests: Sequence[EngineRequest]) -> schemas.EmbeddingUsage:
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    return schemas.EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
