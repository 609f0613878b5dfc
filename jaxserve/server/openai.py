"""OpenAI's routes: each handler reads a request, has it run, and writes the answer down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers.base import BaseRouteHandler

from jaxserve.engine.bad_words import with_bad_words
from jaxserve.request import SamplingParams
from jaxserve.server import validate
from jaxserve.server.context import ServerContext, context_of, new_id
from jaxserve.server.errors import ApiError, ClientDisconnectedError
from jaxserve.server.event_stream import EventStream
from jaxserve.server.generation import Generation, make_choices, unless_disconnected
from jaxserve.server.parse import check_content_type, check_model, parse_body, unknown_model
from jaxserve.server.protocol import ChatDialect, CompletionDialect, Dialect, stream_events
from jaxserve.server.reasoning import thoughts_before
from jaxserve.server.reply import Reply, reply_maker
from jaxserve.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerationRequest,
    ModelCard,
    ModelList,
    StreamOptions,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxserve.server.timing import server_timing
from jaxserve.server.tools import ToolUse, tool_use
from jaxserve.server.validate import Prompt

PROMPT_END = 32
"""Tokens of a prompt that tell whether its template has opened the thoughts of a reasoning model."""
LARGE_BODY = 16 * 1024
"""Bytes from which tokenising would keep the other streams waiting, so that it gets a thread."""


def serving(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Guard: 503 while the model loads, while the server goes down, and when the engine is dead."""
    context_of(connection).check_serving()


@post("/v1/completions", status_code=200, guards=[serving])
async def completions(request: Request[Any, Any, Any]) -> Response[Any]:
    context = context_of(request)
    body = await read_body(request, CompletionRequest, context)
    sampling = validate.completion_sampling(body, context.config, context.defaults)
    await check_structured(context, sampling)
    prompts = await off_loop(request, lambda: validate.completion_prompts(body, context.config, context.tokenizer))
    generation = begin(context, "cmpl", body, prompts, sampling, chat=False)
    return await respond(request, context, body, CompletionDialect(generation))


@post("/v1/chat/completions", status_code=200, guards=[serving])
async def chat_completions(request: Request[Any, Any, Any]) -> Response[Any]:
    context = context_of(request)
    body = await read_body(request, ChatRequest, context)
    tools = tool_use(body, context.config)
    sampling = validate.chat_sampling(body, context.config, context.defaults, tools.structured)
    prompt = await off_loop(request, lambda: validate.chat_prompt(body, context.tokenizer, tools.tools))
    sampling = after_thoughts(context, sampling, prompt)
    await check_structured(context, sampling)
    shown = {*tools.special_tokens, *context.reasoning_tags}
    generation = begin(context, "chatcmpl", body, [prompt], sampling, chat=True, shown=shown)
    replies = make_replies(context, body, tools, prompt)
    return await respond(request, context, body, ChatDialect(generation, replies))


@get("/v1/models", guards=[serving])
async def list_models(request: Request[Any, Any, Any]) -> Response[bytes]:
    context = context_of(request)
    return json_answer(ModelList(data=[_model_card(name, context) for name in context.config.model_names]))


@get("/v1/models/{model_id:path}", guards=[serving])
async def get_model(request: Request[Any, Any, Any]) -> Response[bytes]:
    context = context_of(request)
    wanted = str(request.path_params["model_id"]).strip("/")
    for name in context.config.model_names:
        if name.strip("/") == wanted:
            return json_answer(_model_card(name, context))
    raise unknown_model(wanted, context.config.model_names)


@post("/tokenize", status_code=200, guards=[serving])
async def tokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
    context = context_of(request)
    body = await read_body(request, TokenizeRequest, context)
    tokens = await off_loop(request, lambda: validate.tokens_of(body, context.tokenizer))
    answer = TokenizeResponse(count=len(tokens), max_model_len=context.client.info.max_model_len, tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = [context.tokenizer.token_text(token) for token in tokens]
    return json_answer(answer)


@post("/detokenize", status_code=200, guards=[serving])
async def detokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest, context)
    validate.check_token_ids(body.tokens, context.client.info)
    text = await off_loop(request, lambda: context.tokenizer.decode(body.tokens))
    return json_answer(DetokenizeResponse(prompt=text))


async def read_body[T](request: Request[Any, Any, Any], kind: type[T], context: ServerContext) -> T:
    """The typed body of a request for a model that is served here."""
    check_content_type(request.headers.get("content-type"))
    try:
        raw = await request.body()
    except InternalServerException:  # Litestar's word for a client that left before it had sent all
        raise ClientDisconnectedError("the client closed the connection") from None
    except RequestEntityTooLarge:
        limit = context.config.max_body_bytes
        raise ApiError(413, f"The request body is larger than {limit} bytes, which is this server's limit.") from None
    body = await off_loop(request, lambda: parse_body(raw, kind, request.scope["path_template"]))
    if not context.config.accept_any_model:
        check_model(getattr(body, "model", None), context.config.model_names)
    return body


async def off_loop[T](request: Request[Any, Any, Any], work: Callable[[], T]) -> T:
    """Does the work at once for a small request, in a thread for a large one."""
    if len(await request.body()) < LARGE_BODY:
        return work()
    return await asyncio.to_thread(work)


def after_thoughts(context: ServerContext, sampling: SamplingParams, prompt: Prompt) -> SamplingParams:
    """The same parameters, where what the answer must match comes after a reasoning model's thoughts."""
    if (spec := sampling.structured) is None or context.reasoning is None:
        return sampling
    thoughts = thoughts_before(context.reasoning, _end_of(prompt, context), context.tokenizer)
    spec = msgspec.structs.replace(spec, thoughts=thoughts)
    return msgspec.structs.replace(sampling, structured=spec)


def _end_of(prompt: Prompt, context: ServerContext) -> str:
    return context.tokenizer.decode(prompt.token_ids[-PROMPT_END:])


async def check_structured(context: ServerContext, sampling: SamplingParams) -> None:
    """Raises ``RequestError`` for a schema or grammar that the engine could not hold an answer to."""
    if sampling.structured is not None:
        await context.grammar_check.check(sampling.structured)


def begin(
    context: ServerContext,
    kind: str,
    body: GenerationRequest,
    prompts: list[Prompt],
    sampling: SamplingParams,
    *,
    chat: bool,
    shown: Collection[str] = (),
) -> Generation:
    """Lets the call in, or raises ``RequestError`` for what can never work, ``Overloaded`` for what cannot work now. Of
    special tokens, those ``shown`` are always in the text."""
    request_id, config, info = new_id(kind), context.config, context.client.info
    sampling = with_bad_words(sampling, context.tokenizer)
    prompts = validate.truncate(prompts, body.truncate_prompt_tokens, sampling, info)
    drawn = validate.candidates(sampling, body.best_of)
    deadline = context.deadline(body.deadline_ms)
    requests = validate.admit(request_id, prompts, drawn, body, info, context.draw_seed, deadline, chat=chat)
    context.check_queue(deadline, [item for items in requests for item in items])
    options = body.stream_options or StreamOptions()
    include_usage = bool(options.include_usage) or config.enable_force_include_usage
    timed = config.enable_per_request_metrics
    shown_ids = frozenset(token for text in shown if (token := context.tokenizer.token_id(text)) is not None)
    return Generation(
        id=request_id,
        model=context.model_name,
        tokenizer=context.tokenizer,
        sampling=sampling,
        prompts=prompts,
        choices=make_choices(prompts, requests, drawn, context.tokenizer, shown_ids=shown_ids, timed=timed),
        echo=bool(body.echo),
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        return_tokens_as_token_ids=bool(body.return_tokens_as_token_ids),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.continuous_usage_stats),
    )


def make_replies(
    context: ServerContext, body: ChatRequest, tools: ToolUse, prompt: Prompt
) -> Callable[[], Reply] | None:
    """How the answers' text is taken apart, None where it is not."""
    form = context.reasoning
    prompt_end = _end_of(prompt, context) if form else ""
    return reply_maker(tools, form, prompt_end, include_reasoning=body.include_reasoning is not False)


async def respond(
    request: Request[Any, Any, Any], context: ServerContext, body: GenerationRequest, dialect: Dialect
) -> Response[Any]:
    """The answer, as a stream of events or whole."""
    if body.stream:
        return EventStream(stream_events(dialect, context.client, request.scope))
    await unless_disconnected(request, dialect.generation.complete(context.client))
    metrics = dialect.generation.metrics()
    return json_answer(dialect.answer(), {"Server-Timing": server_timing(metrics)} if metrics else None)


def json_answer(value: msgspec.Struct, headers: dict[str, str] | None = None) -> Response[bytes]:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


def _model_card(name: str, context: ServerContext) -> ModelCard:
    return ModelCard(
        id=name,
        created=context.started,
        root=context.config.engine.model,
        max_model_len=context.client.info.max_model_len,
    )
