"""Penalties, masks and biases in Triton: one pass, which also sums the exponentials of what the model gave, and says of
the result what the sampler's first kernel would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.adjust import EDITS_AT_ONCE, SEEN_MAX, Edits, Penalties
from pallas_kernels.sampling import SamplingRows
from pallas_kernels.triton_sampling import SamplingPlan, plan_sampling, run_kernel
from pallas_kernels.triton_sampling_kernels import exponentials, summarize

Array = jax.Array

COUNT_BITS = tl.constexpr(SEEN_MAX)
EDITS = tl.constexpr(EDITS_AT_ONCE)


@triton.jit
def adjust_kernel(
    logits_ptr, seen_ptr, slots_ptr, presence_ptr, frequency_ptr, repetition_ptr, allowed_ptr, edit_ids_ptr,
    edit_ranges_ptr, edit_values_ptr, temperature_ptr, top_p_ptr, top_k_ptr,
    out_ptr, sums_ptr, stats_ptr, best_ptr, sample_ptr,
    WORDS: tl.constexpr, EDIT_BLOCKS: tl.constexpr, EDIT_BLOCKS_PAD: tl.constexpr, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks): ``out[R, VOCAB]``; ``sums[R, 2, chunks]``, each chunk's largest logit and sum of exponentials
    relative to it; and what ``summarize`` says of the result. ``allowed`` are WORDS words of bits a row;
    ``edit_ranges[R, 2, EDIT_BLOCKS]`` say between which ids the edits of a block are. ``seen`` and ``edit_values`` are
    by slot."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    block = tl.arange(0, EDIT_BLOCKS_PAD)
    range_ptr = edit_ranges_ptr + row * 2 * EDIT_BLOCKS + block
    lowest = tl.load(range_ptr, mask=block < EDIT_BLOCKS, other=VOCAB)
    highest = tl.load(range_ptr + EDIT_BLOCKS, mask=block < EDIT_BLOCKS, other=-1)
    near = ((lowest < (chunk + 1) * CHUNK) & (highest >= chunk * CHUNK)).to(tl.int32)
    x = tl.load(logits_ptr + row * VOCAB + ids, mask=inside, other=float("-inf"))
    peak, total = exponentials(x, ids, VOCAB)
    tl.store(sums_ptr + row * 2 * CHUNKS + chunk, peak)
    tl.store(sums_ptr + (row * 2 + 1) * CHUNKS + chunk, total)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    repetition, slot = tl.load(repetition_ptr + row), tl.load(slots_ptr + row).to(tl.int64)
    if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
        counts = tl.load(seen_ptr + slot * VOCAB + ids, mask=inside, other=0).to(tl.int32)
        generated = counts & COUNT_BITS
        repeated = tl.where(x > 0.0, x / repetition, x * repetition)
        x = tl.where(counts != 0, repeated, x) - frequency * generated.to(tl.float32)
        x -= tl.where(generated > 0, presence, 0.0)
    words = tl.load(allowed_ptr + row * WORDS + ids // 32, mask=inside, other=0)
    x = tl.where((words >> (ids % 32)) & 1 == 1, x, float("-inf"))
    row_ptr = out_ptr + row * VOCAB
    tl.store(row_ptr + ids, x, mask=inside)
    tl.debug_barrier()  # other threads of the program read it, and edit it
    if tl.max(near, 0) != 0:
        for number in range(EDIT_BLOCKS):
            if tl.sum(tl.where(block == number, near, 0), 0) != 0:
                place = number * EDITS + tl.arange(0, EDITS)
                edited = tl.load(edit_ids_ptr + row * EDIT_BLOCKS * EDITS + place)
                mine = (edited >= chunk * CHUNK) & (edited < tl.minimum((chunk + 1) * CHUNK, VOCAB))
                values = tl.load(edit_values_ptr + slot * EDIT_BLOCKS * EDITS + place, mask=mine)
                tl.atomic_add(row_ptr + edited, values, mask=mine, sem="relaxed")
        tl.debug_barrier()
        x = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    summarize(
        x, ids, row, chunk, row_ptr, temperature_ptr, top_p_ptr, top_k_ptr, stats_ptr, best_ptr, sample_ptr,
        False, VOCAB, CHUNK, CHUNKS, STRIDE, SAMPLE,
    )  # fmt: skip


def run_adjust(
    call: Callable[..., Any], plan: SamplingPlan, logits: Any, operands: tuple[Any, ...], edits: Edits,
    rows: SamplingRows,
) -> tuple[Any, ...]:  # fmt: skip
    """``out``, ``sums``, and the sampler's ``stats``; ``operands`` are those of the kernel between logits and edits."""
    parameters, out = plan.stats
    blocks = edits.ranges.shape[2]
    floats = [(jnp.float32, logits.shape), (jnp.float32, (plan.rows, 2, plan.chunks))]
    results: tuple[Any, ...] = call(
        adjust_kernel, (plan.rows, plan.chunks),
        (logits, *operands, *edits, rows.temperature, rows.top_p, rows.top_k), floats + out,
        WORDS=operands[-1].shape[1], EDIT_BLOCKS=blocks, EDIT_BLOCKS_PAD=triton.next_power_of_2(blocks), **parameters,
    )  # fmt: skip
    return results


def adjust_logits(
    logits: Array, seen: Array, slots: Array, penalties: Penalties, allowed: Array, edits: Edits, rows: SamplingRows
) -> tuple[Array, Array, tuple[Array, ...]]:
    operands = (seen, slots, *penalties, allowed)
    adjusted, sums, *stats = run_adjust(run_kernel, plan_sampling(*logits.shape), logits, operands, edits, rows)
    return adjusted, normalizers_of(sums), tuple(stats)


def normalizers_of(sums: Array) -> Array:
    """The logarithms of rows' sums of exponentials ``[R]``, of ``sums[R, 2, C]``: of C parts of a row a logarithm, and
    the sum relative to it."""
    peaks = sums[:, 0].max(-1, keepdims=True)
    return peaks[:, 0] + jnp.log(jnp.sum(sums[:, 1] * jnp.exp(sums[:, 0] - peaks), -1))
