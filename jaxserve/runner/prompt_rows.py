"""What prompt tokens tell beside the next token: their own log-probabilities, or hidden states for an embedding.

Mixed steps leave in ``BatchState.hidden`` what their tokens bring to the last layer. In steps where somebody asks,
``finish`` makes hidden states of it, and two small programs look at them. Logits are made of a slice of the rows at a
time, whatever the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax

from jaxserve.models.config import ModelConfig
from jaxserve.runner.batch import BatchState
from jaxserve.runner.plan import SCORED_AT_ONCE, Plan
from jaxserve.runner.sampler import NON_FINITE, result_rows, split_result
from jaxserve.scheduling.schedule import SchedulerOutput

Array = jax.Array


class PromptScores(msgspec.Struct, frozen=True):
    """Of consecutive prompt tokens N: each given what is before it."""

    logprobs: np.ndarray  # float32 [N]
    ranks: np.ndarray  # int32 [N], 1 for the likeliest
    top_ids: np.ndarray  # int32 [N, max_logprobs]
    top_logprobs: np.ndarray  # float32 [N, max_logprobs]


PromptResult = PromptScores | np.ndarray
"""Scores, or the sum of hidden states, float32 ``[D]``."""


def hidden_shape(plan: Plan, model: ModelConfig) -> jax.ShapeDtypeStruct:
    """Of ``BatchState.hidden``."""
    return jax.ShapeDtypeStruct((plan.max_num_batched_tokens, model.hidden_size), plan.dtype)


def rows_at_once(plan: Plan) -> int:
    """Rows that a call of ``score`` takes."""
    return min(SCORED_AT_ONCE, plan.max_num_batched_tokens)


def score(
    params: Any, state: BatchState, packed: Array, *, logits: Callable[[Any, Array], Array], max_logprobs: int
) -> Array:
    """Inside a program: ``packed[2, N]`` holds rows of ``state.hidden`` and the tokens that follow them. Returns int32
    ``[N, W]``: what ``result_rows`` makes of these tokens, then their ranks."""
    rows, targets = packed
    values = logits(params, state.hidden[rows])
    normalizers = jnp.where(jnp.isfinite(values).all(-1), jax.nn.logsumexp(values, -1), jnp.nan)
    ranks = 1 + jnp.sum(values > jnp.take_along_axis(values, targets[:, None], 1), -1, dtype=jnp.int32)
    return jnp.concatenate([result_rows(targets, values, normalizers, max_logprobs), ranks[:, None]], 1)


def pool(params: Any, state: BatchState, spans: Array, *, norm: Callable[[Any, Array], Array]) -> Array:
    """Inside a program: sums, float32 ``[P, D]``, of the normed hidden states from ``spans[0]`` up to ``spans[1]``; NaN
    where one of them is not finite."""
    hidden = norm(params, state.hidden).astype(jnp.float32)
    index = jnp.arange(hidden.shape[0])
    member = ((index >= spans[0][:, None]) & (index < spans[1][:, None])).astype(jnp.float32)
    finite = jnp.isfinite(hidden).all(-1)
    # What is not finite in one span, or was left behind by an earlier step, must not reach the others.
    sums = jnp.matmul(member, jnp.where(finite[:, None], hidden, 0.0), precision=lax.Precision.HIGHEST)
    return jnp.where((member @ ~finite > 0)[:, None], jnp.nan, sums)


def pack_scores(schedule: SchedulerOutput, at_once: int) -> Iterator[np.ndarray]:
    """The vectors that ``score`` takes for a step, none if there is nothing to score."""
    parts = [(start, work.targets) for _, start, work in _work(schedule) if work.targets is not None]
    if not parts:
        return
    rows = np.concatenate([np.arange(start, start + len(targets)) for start, targets in parts])
    targets = np.concatenate([targets for _, targets in parts])
    for begin in range(0, len(rows), at_once):
        packed = np.zeros((2, at_once), np.int32)
        part = slice(begin, begin + at_once)
        count = len(rows[part])
        packed[0, :count], packed[1, :count] = rows[part], targets[part]
        yield packed


def pack_spans(schedule: SchedulerOutput, max_spans: int) -> np.ndarray | None:
    """What ``pool`` takes for a step; None if there is nothing to pool."""
    spans = [(start, start + work.count) for _, start, work in _work(schedule) if work.targets is None]
    if not spans:
        return None
    packed = np.zeros((2, max_spans), np.int32)
    packed[:, : len(spans)] = np.array(spans).T
    return packed


def _work(schedule: SchedulerOutput) -> Iterator[tuple[int, int, Any]]:
    """Each piece of prompt work: its place among the step's rows, its first token's among the step's tokens, itself."""
    start = len(schedule.decode)
    for place, item in enumerate(schedule.prefill, len(schedule.decode)):
        if item.prompt_work is not None:
            yield place, start + item.prompt_work.first, item.prompt_work
        start += len(item.token_ids)


class PendingPrompts:
    """The programs' results of one step, which may not have run yet."""

    def __init__(self, scores: list[Array], sums: Array | None) -> None:
        self._scores = scores
        self._sums = sums
        for array in [*scores, *([] if sums is None else [sums])]:
            array.copy_to_host_async()

    def results(self, schedule: SchedulerOutput, max_logprobs: int) -> Iterator[tuple[int, PromptResult | None]]:
        """Waits for them; for each row with prompt work its place and what was seen, None if that is not finite."""
        scored = pooled = 0
        table = np.concatenate([np.asarray(part) for part in self._scores]) if self._scores else None
        sums = None if self._sums is None else np.asarray(self._sums)
        for place, _, work in _work(schedule):
            if work.targets is None:
                assert sums is not None
                yield place, sums[pooled] if np.isfinite(sums[pooled]).all() else None
                pooled += 1
            else:
                assert table is not None
                yield place, _scores(table[scored : scored + work.count], max_logprobs)
                scored += work.count


def _scores(rows: np.ndarray, max_logprobs: int) -> PromptScores | None:
    tokens, logprobs, top_ids, top_logprobs = split_result(np.ascontiguousarray(rows[:, :-1]), max_logprobs)
    return None if (tokens == NON_FINITE).any() else PromptScores(logprobs, rows[:, -1], top_ids, top_logprobs)
