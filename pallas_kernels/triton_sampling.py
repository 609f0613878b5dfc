"""The sampler in Triton: thresholds by narrowing, in passes over rows that many programs share; no sort, no atomics.

A row is read in chunks of fixed size, a program each, so its bits do not depend on the batch. The kernels, in order:

- ``stats``: the largest and the lowest logit of each chunk.
- ``narrow``, three times: how many tokens, or how much probability, lie at or above sixteen points. The cut (top-k's,
  or top-p's where there is no top-k) is between two of them; the next pass looks between those. Two dozen to a few
  thousand tokens being in question is enough: mostly one pass is, and the others return at once.
- ``draw``: the best noisy token of those that are kept for sure, and a list of those in question.
- ``resolve``, a program a row: the exact cuts and the best noisy token of the list. Where a list overflows (thousands of
  equal logits at the cut, a top-k of ten thousands with top-p) it takes the whole row, which is slow but as exact.

The kept set, the noise and the ties are those of ``sampling``, the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.sampling import SamplingRows

Array = jax.Array

NARROWING_PASSES = 3
POINTS = tl.constexpr(16)
ENOUGH = tl.constexpr(2048)
"""Narrow no further when at most so many tokens are in question."""
TINY = tl.constexpr(1.17549435e-38)


@triton.jit
def _cuts(top_p_ptr, top_k_ptr, row, VOCAB: tl.constexpr):
    """top-p and top-k of a row, and whether it wants them."""
    top_p, top_k = tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
    return top_p, top_k, top_p < 1.0, (top_k > 0) & (top_k < VOCAB)


@triton.jit
def _range(stats_ptr, row, temperature, min_p, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """The row's largest logit, the least that min-p keeps (a finite one), and where most of the row starts."""
    chunk = tl.arange(0, CHUNKS_PAD)
    at = stats_ptr + row * 2 * CHUNKS + chunk
    peak = tl.max(tl.load(at, mask=chunk < CHUNKS, other=float("-inf")), 0)
    lowest = tl.load(at + CHUNKS, mask=chunk < CHUNKS, other=float("inf"))
    floor = tl.min(lowest, 0)
    if min_p > 0.0:
        floor = tl.maximum(floor, peak + temperature * tl.log(min_p))
    # The highest of the chunks' lowest: the few masked tokens of a padded vocabulary do not stretch the range.
    return peak, floor, tl.max(tl.where(lowest < float("inf"), lowest, float("-inf")), 0)


@triton.jit
def _bracket(points_ptr, sums_ptr, row, top_p, top_k, cut_k, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """From a pass: the points that the cut lies between, the amount wanted, and the amounts at or above the points."""
    point, chunk = tl.arange(0, POINTS), tl.arange(0, CHUNKS_PAD)
    at = sums_ptr + (row * CHUNKS + chunk[:, None]) * POINTS + point[None, :]
    amounts = tl.sum(tl.load(at, mask=chunk[:, None] < CHUNKS, other=0.0), 0)
    values = tl.load(points_ptr + row * POINTS + point)
    total = tl.max(amounts, 0)  # the first point's: the higher the point, the less
    # Never zero: the best token stays.
    wanted = tl.where(cut_k, top_k.to(tl.float32), tl.maximum(top_p * total, TINY))
    enough = amounts >= wanted
    first = tl.min(values, 0)
    low, high = tl.max(tl.where(enough, values, first), 0), tl.min(tl.where(enough, float("inf"), values), 0)
    at_low, at_high = tl.min(tl.where(enough, amounts, total), 0), tl.max(tl.where(enough, 0.0, amounts), 0)
    return low, high, wanted, at_low, at_high


@triton.jit
def stats_kernel(
    logits_ptr, stats_ptr, best_ptr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks): ``stats[R, 2, chunks]``, the largest logit and the lowest finite one, and ``best[R, chunks]``,
    the lowest id of the largest."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    peak, lowest = tl.full([TILE], float("-inf"), tl.float32), tl.full([TILE], float("inf"), tl.float32)
    best = tl.full([TILE], VOCAB, tl.int32)
    first = chunk * CHUNK
    for at in tl.range(first, tl.minimum(first + CHUNK, VOCAB), TILE, num_stages=4):
        ids = at + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
        best = tl.where(x > peak, ids, best)
        peak = tl.maximum(peak, x)
        lowest = tl.minimum(lowest, tl.where(x > float("-inf"), x, float("inf")))
    highest = tl.max(peak, 0)
    tl.store(stats_ptr + row * 2 * CHUNKS + chunk, highest)
    tl.store(stats_ptr + (row * 2 + 1) * CHUNKS + chunk, tl.min(lowest, 0))
    tl.store(best_ptr + row * CHUNKS + chunk, tl.min(tl.where(peak == highest, best, VOCAB), 0))


@triton.jit
def narrow_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, stats_ptr, points_ptr, sums_ptr,
    points_out_ptr, sums_out_ptr, FIRST: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks): sixteen ``points[R, 16]``, the first the least that is kept at all, and for each chunk the
    number (for top-k) or the weight (for top-p) of the tokens at or above each, ``sums[R, chunks, 16]``. What is narrow
    enough is handed on as it is. The FIRST pass reads neither of the two."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_p, top_k, cut_p, cut_k = _cuts(top_p_ptr, top_k_ptr, row, VOCAB)
    if (temperature > 0.0) & (cut_p | cut_k):
        point = tl.arange(0, POINTS)
        place = sums_out_ptr + (row * CHUNKS + chunk) * POINTS + point
        peak, floor, low = _range(stats_ptr, row, temperature, tl.load(min_p_ptr + row), CHUNKS, CHUNKS_PAD)
        scale = 1.0 / tl.maximum(temperature, 1e-30)
        high, narrow = float("inf"), False
        if FIRST:
            if not cut_k:  # below, no weight to speak of
                low = tl.maximum(low, peak - 32.0 * temperature)
            low = tl.minimum(tl.maximum(low, floor), peak)
        else:
            low, high, wanted, at_low, at_high = _bracket(
                points_ptr, sums_ptr, row, top_p, top_k, cut_k, CHUNKS, CHUNKS_PAD
            )
            # All at or above the lower point if top-p comes after top-k. Else those between; of weights, at most.
            inside = at_low - tl.where(cut_k & cut_p, 0.0, at_high)
            narrow = inside <= ENOUGH * tl.where(cut_k, 1.0, tl.exp((low - peak) * scale))
        if narrow:
            values = tl.load(points_ptr + row * POINTS + point)
            tl.store(place, tl.load(sums_ptr + (row * CHUNKS + chunk) * POINTS + point))
        else:
            step = (point - 1).to(tl.float32) / (POINTS - 1.0)
            values = low * (1.0 - step) + tl.minimum(high, peak) * step
            values = tl.where(point == 1, low, tl.where(point == POINTS - 1, high, tl.maximum(values, low)))
            values = tl.where(point == 0, floor, values)
            row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
            sums = tl.zeros([POINTS, TILE], tl.float32)
            first = chunk * CHUNK
            for at in tl.range(first, tl.minimum(first + CHUNK, VOCAB), TILE, num_stages=4):
                ids = at + tl.arange(0, TILE)
                x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
                amount = tl.where(cut_k, 1.0, tl.exp((x - peak) * scale))
                sums += tl.where(x[None, :] >= values[:, None], 1.0, 0.0) * amount[None, :]
            tl.store(place, tl.sum(sums, 1))
        if chunk == 0:
            tl.store(points_out_ptr + row * POINTS + point, values)


@triton.jit
def _noisy(bits, x, peak, scale):
    """Scores with Gumbel noise, the logarithm of an exponential variate: with full resolution where that is small,
    which is where the largest noise comes from."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 1.0 - 5.9604644775390625e-08)
    exponential = tl.where(uniform < 0.0001, uniform + uniform * uniform * 0.5, -tl.log(1.0 - uniform))
    return (x - peak) * scale - tl.log(exponential)


@triton.jit
def _random(seeds_ptr, positions_ptr, choices_ptr, row, group):
    """Philox's four words for groups of four ids."""
    low, high = tl.load(seeds_ptr + 2 * row), tl.load(seeds_ptr + 2 * row + 1)
    seed = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    zero = (group * 0).to(tl.uint32)
    position, choice = tl.load(positions_ptr + row).to(tl.uint32), tl.load(choices_ptr + row).to(tl.uint32)
    return tl.philox(seed, group.to(tl.uint32), zero + position, zero + choice, zero)


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr, choices_ptr, positions_ptr,
    stats_ptr, points_ptr, sums_ptr, score_ptr, best_ptr, count_ptr, list_ptr, SEGMENT: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks): noisy ``score`` and id (``best``) of the best token that is kept for sure, and the ids of those
    in question: their ``count[R, chunks]``, and the first SEGMENT of them in ``list[R, chunks, SEGMENT]``."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        top_p, top_k, cut_p, cut_k = _cuts(top_p_ptr, top_k_ptr, row, VOCAB)
        peak, floor, _ = _range(stats_ptr, row, temperature, tl.load(min_p_ptr + row), CHUNKS, CHUNKS_PAD)
        scale = 1.0 / tl.maximum(temperature, 1e-30)
        low, sure = floor, floor
        if cut_p | cut_k:
            low, sure, wanted, at_low, at_high = _bracket(
                points_ptr, sums_ptr, row, top_p, top_k, cut_k, CHUNKS, CHUNKS_PAD
            )
            if cut_p & cut_k:
                sure = float("inf")
        place = row * CHUNKS + chunk
        row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
        winner, best = tl.full([TILE], float("-inf"), tl.float32), tl.full([TILE], VOCAB, tl.int32)
        count = tl.full([], 0, tl.int32)
        first = chunk * CHUNK
        for at in tl.range(first, tl.minimum(first + CHUNK, VOCAB), TILE, num_stages=4):
            ids = at + tl.arange(0, TILE)
            x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
            kept, asked = x >= sure, (x >= low) & (x < sure)
            found = tl.sum(kept.to(tl.int32) * 65536 + asked.to(tl.int32), 0)  # both in one reduction
            if found >= 65536:
                group = at // 4 + tl.arange(0, TILE // 4)
                a, b, c, d = _random(seeds_ptr, positions_ptr, choices_ptr, row, group)
                bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
                noisy = tl.where(kept, _noisy(bits, x, peak, scale), float("-inf"))
                best = tl.where(noisy > winner, ids, best)
                winner = tl.maximum(winner, noisy)
            if found % 65536 > 0:
                slot = count + tl.cumsum(asked.to(tl.int32), 0) - 1
                tl.store(list_ptr + place.to(tl.int64) * SEGMENT + slot, ids, mask=asked & (slot < SEGMENT))
                count += found % 65536
        score = tl.max(winner, 0)
        tl.store(score_ptr + place, score)
        tl.store(best_ptr + place, tl.min(tl.where(winner == score, best, VOCAB), 0))
        tl.store(count_ptr + place, count)


@triton.jit
def _tokens(row_ptr, list_ptr, count, floor, at, SEGMENT: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """A tile of the tokens in question: ids, logits, and these as uint32 that order as the floats do. ``count[chunks]``
    of each segment of the list, or none of it: then they are the row's."""
    slot = at + tl.arange(0, TILE)
    end = tl.cumsum(count, 0)
    before = slot[:, None] >= end[None, :]
    segment = tl.sum(before.to(tl.int32), 1)
    there = slot - tl.sum(tl.where(before, count[None, :], 0), 1)
    listed = tl.sum(count, 0)
    inside = slot < tl.where(listed > 0, listed, VOCAB)
    ids = tl.load(list_ptr + segment * SEGMENT + there, mask=inside & (listed > 0), other=VOCAB)
    ids = tl.where(listed > 0, ids, slot)
    x = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    x = tl.where(x >= floor, x, float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    return ids, x, tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _within(keys, threshold, room, ties, VOCAB: tl.constexpr):
    """Which keys are over the threshold or among the first ``room`` equal to it, and the equal ones seen so far."""
    kept = keys >= threshold
    if room < VOCAB:
        equal = (keys == threshold).to(tl.int32)
        kept = (keys > threshold) | ((equal == 1) & (ties + tl.cumsum(equal, 0) <= room))
        ties += tl.sum(equal, 0)
    return kept, ties
