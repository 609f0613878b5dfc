"""The one door: what can never work is refused here, before anything is queued or sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil

from jaxserve.engine.messages import Load, ModelInfo
from jaxserve.request import EngineRequest, Pooling, RequestError, SamplingParams, fresh_seed

REFUSAL_REASONS = ("queued_reqs", "queued_tokens", "queue_wait", "deadline")
MAX_RETRY_AFTER = 600
MAX_PRIORITY = 1000
"""Either way; waiting makes up for it, and with more it would take too long."""


def room(prompt_len: int, info: ModelInfo, least: int = 1) -> int:
    """Tokens that may follow a prompt of this length; raises ``RequestError`` if they are fewer than ``least``."""
    limit = min(info.max_model_len, info.max_kv_tokens)
    if prompt_len + least > limit:
        what = "context length" if limit == info.max_model_len else "KV cache capacity"
        needed = "; at least one token of room is needed for the answer." if least else "."
        raise RequestError(
            f"This model's maximum {what} is {limit} tokens, but the prompt has {prompt_len} tokens{needed}",
            param="messages",
            code="context_length_exceeded",
        )
    return limit - prompt_len


def check(prompt_token_ids: Sequence[int], sampling: SamplingParams, info: ModelInfo) -> int:
    """The resolved max_tokens of a request; raises ``RequestError`` for one that can never be served."""
    if not prompt_token_ids:
        raise RequestError("The prompt is empty; at least one token is needed.", param="prompt")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= info.vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"Token id {bad} is not in [0, {info.vocab_size}).", param="prompt")
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": chain.from_iterable(sampling.bad_words_token_ids),
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < info.vocab_size:
                raise RequestError(f"{name} holds {token}, which is not in [0, {info.vocab_size}).", param=name)
    if sampling.bad_words and not sampling.bad_words_token_ids:
        raise RequestError("bad_words must be split into tokens before (with_bad_words).", param="bad_words")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, name) or 0) > info.max_logprobs:
            raise RequestError(
                f"{name} may ask for at most {info.max_logprobs} tokens, got {getattr(sampling, name)}.", param=name
            )
    available = room(len(prompt_token_ids), info, 0 if sampling.max_tokens == 0 else 1)
    if sampling.max_tokens is None:
        if sampling.min_tokens > available:
            raise RequestError(
                f"There is room for {available} tokens after the prompt, fewer than min_tokens={sampling.min_tokens}.",
                param="min_tokens",
            )
        return available
    if sampling.max_tokens > available:
        limit = min(info.max_model_len, info.max_kv_tokens)
        what = "context length" if limit == info.max_model_len else "KV cache capacity"
        raise RequestError(
            f"This model's maximum {what} is {limit} tokens, but the request needs"
            f" {len(prompt_token_ids) + sampling.max_tokens}: {len(prompt_token_ids)} of prompt and"
            f" max_tokens={sampling.max_tokens}.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return sampling.max_tokens


def examines_prompt(item: EngineRequest) -> bool:
    """Whether the prompt itself has something to tell, so that nothing need be generated."""
    return item.sampling.prompt_logprobs is not None or item.pooling is not None


def _check_priority(priority: int) -> None:
    if abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {priority}.", param="priority"
        )


class Overloaded(Exception):
    """A call that would wait too long. ``reason`` is one of REFUSAL_REASONS; ``retry_after`` are seconds from now."""

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait for its first step; None: no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None
    max_wait: float | None = None
    """Seconds, as estimated from what was measured lately."""
    num_clients: int = 1
    """That keep the limits together, though each knows only what it sent itself."""

    def check(self, load: Load, sent: Sequence[EngineRequest], deadline: float | None = None) -> None:
        """Raises ``Overloaded`` if there is no room for one more request. ``sent`` are those of this client that
        ``load`` does not know of yet; the others count as having sent as much, so that between them they send no more
        than there is room for."""
        sent = [*sent] * self.num_clients
        late = sent[load.free_slots :] if load.waiting == 0 else sent
        waiting = load.waiting + len(late)
        tokens = load.waiting_tokens + sum(len(request.prompt_token_ids) for request in late)
        wait = load.wait_seconds + len(late) * load.request_seconds
        # What waits now has gone by then; nobody knows how much will come meanwhile.
        retry_after = min(max(ceil(wait), 1), MAX_RETRY_AFTER)
        if self.max_requests is not None and waiting >= self.max_requests:
            raise Overloaded("queued_reqs", f"The server is full: {waiting} requests wait already.", retry_after)
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise Overloaded("queued_tokens", f"The server is full: {tokens} tokens wait already.", retry_after)
        if self.max_wait is not None and waiting and wait > self.max_wait:
            raise Overloaded(
                "queue_wait",
                f"The server is full: a new request would wait about {wait:.1f} s.",
                retry_after,
            )
        if deadline is not None and waiting and time.monotonic() + wait > deadline:
            raise Overloaded(
                "deadline",
                f"The server is full: a new request would wait about {wait:.0f} s, past its deadline.",
                retry_after,
            )


def make_requests(
    request_id: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    info: ModelInfo,
    *,
    arrival_time: float | None = None,
    draw_seed: Callable[[], int] = fresh_seed,
    group: str = "",
    priority: int = 0,
    cache_salt: str | None = None,
    deadline: float | None = None,
    pooling: Pooling | None = None,
) -> list[EngineRequest]:
    """``sampling.n`` engine requests, ids ``REQUEST_ID-0`` …; one seed, told apart by their choice index.

    Raises ``RequestError``. With max_tokens 0 the engine takes only what ``examines_prompt``; callers answer the rest
    themselves after ``check``.
    """
    max_tokens = check(prompt_token_ids, sampling, info)
    _check_priority(priority)
    seed = draw_seed() if sampling.seed is None else sampling.seed
    arrival_time = time.monotonic() if arrival_time is None else arrival_time
    return [
        EngineRequest(
            request_id=f"{request_id}-{index}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=seed,
            choice_index=index,
            arrival_time=arrival_time,
            group=group or request_id,
            priority=priority,
            cache_salt=cache_salt,
            deadline=deadline,
            pooling=pooling,
        )
        for index in range(sampling.n)
    ]
