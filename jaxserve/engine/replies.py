"""What a request's client is told."""

from __future__ import annotations

import numpy as np

from jaxserve.engine.messages import PromptLogprobs, Timings, TokenLogprobs, TokenOutput
from jaxserve.request import FinishReason, Request, Status
from jaxserve.runner.runner import RowOutput
from jaxserve.scheduling.schedule import ScheduledRequest


def new_tokens(request: Request, item: ScheduledRequest, row: RowOutput, tokens: list[int]) -> TokenOutput:
    """The tokens that a step added to the request, which they may have ended; none if its prompt is all that counts."""
    first = request.num_output_tokens == len(tokens)
    done = request.status is Status.FINISHED
    logprobs = None
    if item.wants_logprobs and tokens:
        assert row.logprob is not None and request.sampling.logprobs is not None
        top = request.sampling.logprobs
        logprobs = [TokenLogprobs(row.logprob, list(row.top_ids[:top]), list(row.top_logprobs[:top]))]
    stopped = request.finish_reason is FinishReason.STOP and tokens[-1] in request.sampling.stop_token_ids
    return TokenOutput(
        request_id=request.client_request_id,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=request.finish_reason.value if done and request.finish_reason else None,
        stop_reason=tokens[-1] if stopped else None,
        timings=_timings(request) if done or first else None,
        cached_tokens=request.num_cached_tokens,
        prompt_logprobs=_prompt_logprobs(request) if first else None,
        embedding=_embedding(request) if request.pooling is not None else None,
    )


def _prompt_logprobs(request: Request) -> list[PromptLogprobs] | None:
    top = request.sampling.prompt_logprobs
    if top is None:
        return None
    parts, request.prompt_results = request.prompt_results, []
    return [
        PromptLogprobs(*entry)
        for part in parts
        for entry in zip(
            part.logprobs.tolist(),
            part.ranks.tolist(),
            part.top_ids[:, :top].tolist(),
            part.top_logprobs[:, :top].tolist(),
            strict=True,
        )
    ]


def _embedding(request: Request) -> bytes:
    pooled = np.sum(request.prompt_results, 0, dtype=np.float64)
    # Of a vector of zeros there is no direction; it stays what it is.
    return (pooled / (np.linalg.norm(pooled) or 1.0)).astype("<f4").tobytes()


def ending(request: Request, *, stop_reason: str | None = None, error: str | None = None) -> TokenOutput:
    """The last output of a request that ends between two tokens."""
    assert request.finish_reason is not None
    return TokenOutput(
        request_id=request.client_request_id,
        token_ids=[],
        finish_reason=request.finish_reason.value,
        stop_reason=stop_reason,
        error=error,
        timings=_timings(request),
        cached_tokens=request.num_cached_tokens,
    )


def _timings(request: Request) -> Timings:
    return Timings(request.arrival_time, request.scheduled_time, request.first_token_time, request.last_token_time)
