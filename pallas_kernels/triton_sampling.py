"""The sampler in Triton: thresholds by narrowing, in passes over rows that many programs share; no sort, no atomics.

A row is read in chunks of a fixed size, a program each, so that its bits do not depend on the batch. The kernels:

- ``stats``: the largest and the lowest logit of each chunk.
- ``narrow``, three times: how many tokens, or how much probability, lie at or above sixteen points. The cut (top-k's,
  or top-p's where there is no top-k) is between two of them, and the next pass looks there. With at most 2048 tokens in
  question a row is narrow enough: mostly one pass finds it so, and the others return at once.
- ``draw``: the best noisy token of those kept for sure, and a list of those in question.
- ``resolve``, a program a row: the exact cuts, and the best noisy token, of the list. Where a list overflows (thousands
  of equal logits at the cut, or top-p after a top-k of thousands) it takes the whole row: slow, but as exact.

The kept set, the noise and the ties are those of ``sampling``, the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton

from pallas_kernels.sampling import SamplingRows
from pallas_kernels.triton_sampling_kernels import POINTS, draw_kernel, narrow_kernel, resolve_kernel, stats_kernel

Array = jax.Array

NARROWING_PASSES = 3


@dataclass(frozen=True)
class SamplingPlan:
    """Launch parameters, from shapes alone."""

    rows: int
    shared: dict[str, int]  # of all kernels
    segment: int = 2048  # so few tokens in question are narrow enough; and what a chunk's list takes
    capacity: int = 4096  # what a row's takes
    resolve_tile: int = 256

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.shared["CHUNKS"]


def plan_sampling(rows: int, vocab: int, chunk: int = 8192, tile: int = 1024) -> SamplingPlan:
    """The chunks depend on the vocabulary alone, so that a row's sums are the same bits in any batch."""
    chunks = triton.cdiv(vocab, chunk)
    shared = dict(VOCAB=vocab, CHUNK=chunk, TILE=tile, CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks))
    return SamplingPlan(rows, shared)


def run_kernels(call: Callable[..., Any], plan: SamplingPlan, logits: Any, rows: SamplingRows, positions: Any) -> Any:
    """The kernels in order. ``call(kernel, grid, operands, out, **parameters)`` runs one and returns its results, which
    ``out`` describes: a dtype and a shape each."""
    count, chunks = plan.grid
    cuts = (rows.temperature, rows.top_p, rows.min_p, rows.top_k)
    noise = (rows.seeds, rows.choices, positions)
    floats, ids = jnp.float32, jnp.int32
    stats, argmax = call(
        stats_kernel, plan.grid, (logits,), [(floats, (count, 2, chunks)), (ids, (count, chunks))], **plan.shared
    )
    measured = (stats, stats)  # of the first pass's two, neither is read
    for index in range(NARROWING_PASSES):
        measured = call(
            narrow_kernel, plan.grid, (logits, *cuts, stats, *measured),
            [(floats, (count, POINTS.value)), (floats, (count, chunks, POINTS.value))], FIRST=index == 0,
            SEGMENT=plan.segment, **plan.shared,
        )  # fmt: skip
    drawn = call(
        draw_kernel, plan.grid, (logits, *cuts, *noise, stats, *measured),
        [(floats, (count, chunks)), *[(ids, (count, chunks))] * 2, (ids, (count, chunks, plan.segment))],
        SEGMENT=plan.segment, **plan.shared,
    )  # fmt: skip
    tokens, *_ = call(
        resolve_kernel, (count,), (logits, *cuts, *noise, stats, argmax, *measured, *drawn),
        [(ids, (count,)), (floats, (count, plan.capacity)), (ids, (count, plan.capacity))],
        SEGMENT=plan.segment, CAPACITY=plan.capacity, **{**plan.shared, "TILE": plan.resolve_tile},
    )  # fmt: skip
    return tokens


def sample(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    import jax_triton

    def call(kernel: Any, grid: Any, operands: Any, out: Any, **parameters: Any) -> Any:
        types = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in out]
        return jax_triton.triton_call(*operands, kernel=kernel, grid=grid, num_warps=8, out_type=types, **parameters)

    result: Array = run_kernels(call, plan_sampling(*logits.shape), logits, rows, positions)
    return result
