"""Penalties, masks and biases in Triton: one pass, which also says what the sampler's first kernel would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.adjust import EDITS_AT_ONCE, SEEN_MAX, Allowed, Edits, Penalties
from pallas_kernels.sampling import SamplingRows
from pallas_kernels.triton_sampling import SamplingPlan, plan_sampling, run_kernel
from pallas_kernels.triton_sampling_kernels import cuts, in_turn, summarize, summarize_given

Array = jax.Array

COUNT_BITS = tl.constexpr(SEEN_MAX)
EDITS = tl.constexpr(EDITS_AT_ONCE)


@triton.jit
def adjust_kernel(
    logits_ptr, seen_ptr, slots_ptr, presence_ptr, frequency_ptr, repetition_ptr,
    row_words_ptr, slot_words_ptr, restricted_ptr, edit_ids_ptr, lowest_ptr, highest_ptr, edit_values_ptr,
    temperature_ptr, top_p_ptr, top_k_ptr, out_ptr, stats_ptr, best_ptr, sample_ptr,
    WORDS: tl.constexpr, EDIT_BLOCKS: tl.constexpr, EDIT_BLOCKS_PAD: tl.constexpr, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Grid (R * chunks,): ``out[R, VOCAB]``; what ``summarize_given`` says of each chunk, and ``summarize`` of the
    result. ``row_words`` and ``slot_words`` are WORDS words of bits a row; ``lowest[R, EDIT_BLOCKS]`` and ``highest``
    say between which ids the edits of a block are. ``seen``, ``slot_words`` and ``edit_values`` are by slot. What
    all programs read is asked for before the first sum, whose threads wait for each other."""
    row, chunk = (tl.program_id(0) // CHUNKS).to(tl.int64), tl.program_id(0) % CHUNKS
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    block = tl.arange(0, EDIT_BLOCKS_PAD)
    lowest = tl.load(lowest_ptr + row * EDIT_BLOCKS + block, mask=block < EDIT_BLOCKS, other=VOCAB)
    highest = tl.load(highest_ptr + row * EDIT_BLOCKS + block, mask=block < EDIT_BLOCKS, other=-1)
    near = ((lowest < (chunk + 1) * CHUNK) & (highest >= chunk * CHUNK)).to(tl.int32)
    x = tl.load(logits_ptr + row * VOCAB + ids, mask=inside, other=float("-inf"))
    group = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    words = tl.load(row_words_ptr + row * WORDS + group // 8, mask=group < (VOCAB + 3) // 4, other=0)
    temperature = tl.load(temperature_ptr + row)
    _, _, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    repetition, slot = tl.load(repetition_ptr + row), tl.load(slots_ptr + row).to(tl.int64)
    restricted = group < tl.where(tl.load(restricted_ptr + row) == 1, (VOCAB + 3) // 4, 0)
    words = words & tl.load(slot_words_ptr + slot * WORDS + group // 8, mask=restricted, other=-1)
    words = words >> (group % 8 * 4)
    penalized = (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0)
    known = ids < tl.where(penalized, VOCAB, 0)
    # As many neighbours a thread as of float32, or they would change threads on their way to the logits.
    places = slot * VOCAB + tl.max_contiguous(ids, 4)
    counts = tl.load(seen_ptr + places, mask=known, other=0).to(tl.int32)
    summarize_given(x, ids, row, chunk, stats_ptr, VOCAB, CHUNKS)
    if penalized:
        generated = counts & COUNT_BITS
        repeated = tl.where(x > 0.0, x / repetition, x * repetition)
        x = tl.where(counts != 0, repeated, x) - frequency * generated.to(tl.float32)
        x -= tl.where(generated > 0, presence, 0.0)
    allowed = in_turn(words & 1, words & 2, words & 4, words & 8)
    x = tl.where(allowed != 0, x, float("-inf"))
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
        x, tl.max(x, 0), ids, row, chunk, temperature, cut_p, cut_k, row_ptr, stats_ptr, best_ptr, sample_ptr,
        VOCAB, CHUNK, CHUNKS, STRIDE, SAMPLE,
    )  # fmt: skip


def run_adjust(
    call: Callable[..., Any], plan: SamplingPlan, logits: Any, seen: Any, slots: Any, penalties: Penalties,
    allowed: Allowed, edits: Edits, rows: SamplingRows,
) -> tuple[Any, ...]:  # fmt: skip
    """``out``, and the sampler's ``stats``."""
    parameters, out = plan.stats
    blocks = edits.lowest.shape[1]
    results: tuple[Any, ...] = call(
        adjust_kernel, (plan.programs,),
        (logits, seen, slots, *penalties, *allowed, *edits, rows.temperature, rows.top_p, rows.top_k),
        [(jnp.float32, logits.shape), *out],
        WORDS=allowed.by_row.shape[1], EDIT_BLOCKS=blocks, EDIT_BLOCKS_PAD=triton.next_power_of_2(blocks), **parameters,
    )  # fmt: skip
    return results


def adjust_logits(
    logits: Array, seen: Array, slots: Array, penalties: Penalties, allowed: Allowed, edits: Edits, rows: SamplingRows
) -> tuple[Array, tuple[Array, ...]]:
    plan = plan_sampling(*logits.shape)
    adjusted, *stats = run_adjust(run_kernel, plan, logits, seen, slots, penalties, allowed, edits, rows)
    return adjusted, tuple(stats)
