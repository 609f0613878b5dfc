"""The sampler in Triton: two passes over the logits, in chunks that many programs share; no sort, no atomics.

Logits are read in chunks of a fixed size, a program each, so that a row's bits do not depend on the batch. The kernels:

- ``stats``: of each chunk the largest logit and the sums of exponentials, and a sample of 2,000 to 4,000 tokens. Where
  logits are adjusted before (``triton_adjust``), the kernel that does so says this, too.
- ``pivot``, a program a row: from the sample, two logits that the cut lies between (top-k's, or top-p's where there is
  no top-k), almost surely.
- ``draw``: the likely winners of those above the lower one, and exact sums, which tell whether the cut is where the
  sample has it. Where few tokens are above, the upper bound is infinite, and these are listed instead.
- ``resolve``, a program a row: the winner. Mostly it is above both bounds and kept for sure, so that nobody need know
  the exact cut. One between them is compared with the whole row: are enough above it to exclude it, the winner of
  those above is next. Of a list it is the best noisy token by the exact cuts. Where the sample was wrong or the list
  overflows (top-p after a top-k of thousands, many equal logits) the whole row is the list: slow, but as exact.

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
from pallas_kernels.triton_call import triton_call
from pallas_kernels.triton_sampling_kernels import KINDS, draw_kernel, pivot_kernel, stats_kernel
from pallas_kernels.triton_sampling_resolve import resolve_kernel

Array = jax.Array

MAX_SAMPLE = 4096


@dataclass(frozen=True)
class SamplingPlan:
    """Launch parameters. Everything but the rows follows from the vocabulary alone, so that a row's sums are the same
    bits in any batch."""

    rows: int
    vocab: int
    chunk: int = 1024
    stride: int = 32
    """Of so many logits one is in the sample. It divides ``chunk``: a program samples what it has written itself."""
    listed: int = 3072
    """So many tokens are listed, more are bounded from above."""
    segment: int = 512
    """What a chunk's list takes."""
    capacity: int = 16384
    """What a row's list takes."""
    tile: int = 1024
    """Of a row's list, read in one go."""
    wide: int = 2048
    """Of a row that a token is compared with, read in one go."""
    chunk_warps: int = 2
    """Of a chunk's program: few, since its steps wait for each other, so that more programs run at a time."""

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.vocab, self.chunk)

    @property
    def programs(self) -> int:
        """Of kernels that share rows: those of a row side by side, which reads memory faster. One number, since there
        may be more rows than a grid's second one can count."""
        return self.rows * self.chunks

    @property
    def sampled(self) -> int:
        """Logits of a row's sample."""
        return self.vocab // self.stride

    @property
    def stats(self) -> tuple[dict[str, int], list[tuple[Any, tuple[int, ...]]]]:
        """Parameters of kernels that ``summarize`` chunks, and what these write."""
        assert self.chunk % self.stride == 0
        parameters = dict(
            CHUNK=self.chunk, CHUNKS=self.chunks, VOCAB=self.vocab, STRIDE=self.stride, SAMPLE=self.sampled,
            num_warps=self.chunk_warps,
        )  # fmt: skip
        rows, floats = self.rows, jnp.float32
        by_chunk = (rows, self.chunks)
        by_kind = (rows, KINDS.value, self.chunks)
        return parameters, [(floats, by_kind), (jnp.int32, by_chunk), (floats, (rows, self.sampled))]


def plan_sampling(rows: int, vocab: int) -> SamplingPlan:
    return SamplingPlan(rows, vocab, stride=triton.next_power_of_2(triton.cdiv(vocab, MAX_SAMPLE)))


def run_kernels(
    call: Callable[..., Any], plan: SamplingPlan, logits: Any, rows: SamplingRows, positions: Any, stats: Any = ()
) -> tuple[Any, Any]:
    """The kernels in order, but the first where it is known what it says (``stats``). ``call(kernel, grid, operands,
    out, **parameters)`` runs one and returns its results, which ``out`` describes: a dtype and a shape each."""
    count, chunks = plan.rows, plan.chunks
    cuts = (rows.temperature, rows.top_p, rows.top_k)
    noise = (rows.seeds, rows.choices, positions)
    floats, ids = jnp.float32, jnp.int32
    shared = dict(VOCAB=plan.vocab, CHUNKS=chunks)
    of_row = dict(CHUNKS_PAD=triton.next_power_of_2(chunks), **shared)
    if not stats:
        parameters, out = plan.stats
        stats = call(stats_kernel, (plan.programs,), (logits, *cuts), out, **parameters)
    stats, argmax, sampled = stats
    [bounds] = call(
        pivot_kernel, (count,), (*cuts, rows.min_p, stats, sampled), [(floats, (count, 4))],
        SAMPLE=plan.sampled, SAMPLE_PAD=triton.next_power_of_2(plan.sampled), LISTED=plan.listed, num_warps=4, **of_row,
    )  # fmt: skip
    drawn = call(
        draw_kernel, (plan.programs,), (logits, *cuts, *noise, stats, bounds),
        [
            (floats, (count, 3, chunks)), (floats, (count, 2, chunks)),
            (ids, (count, chunks)), (ids, (count, chunks)), (ids, (count, chunks, plan.segment)),
        ],
        SEGMENT=plan.segment, CHUNK=plan.chunk, num_warps=plan.chunk_warps, **shared,
    )  # fmt: skip
    tokens, normalizers, *_ = call(
        resolve_kernel, (count,), (logits, *cuts, *noise, stats, argmax, bounds, *drawn),
        [(ids, (count,)), (floats, (count,)), (floats, (count, plan.capacity)), (ids, (count, plan.capacity))],
        CHUNK=plan.chunk, SEGMENT=plan.segment, CAPACITY=plan.capacity, TILE=plan.tile, WIDE=plan.wide,
        num_warps=8, **of_row,
    )  # fmt: skip
    return tokens, normalizers


def run_kernel(kernel: Any, grid: Any, operands: Any, out: Any, **parameters: Any) -> Any:
    types = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in out]
    return triton_call(*operands, kernel=kernel, grid=grid, out_type=types, **parameters)


def sample(logits: Array, rows: SamplingRows, positions: Array, stats: tuple[Array, ...] = ()) -> tuple[Array, Array]:
    return run_kernels(run_kernel, plan_sampling(*logits.shape), logits, rows, positions, stats)
