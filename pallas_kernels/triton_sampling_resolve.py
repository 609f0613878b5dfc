"""The last kernel of the Triton sampler: the exact cut, and the token."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_sampling_kernels import (
    TINY,
    better,
    chunk_peaks,
    cuts,
    noisy,
    ordered,
    peak_and_floor,
    random_bits,
    scale_of,
)

POINTS = tl.constexpr(8)
GATHERED = tl.constexpr(256)
"""Listed tokens that are gathered in one go; each is compared with all chunks."""


@triton.jit
def _gather(row_ptr, list_ptr, count, tokens_ptr, ids_ptr, SEGMENT: tl.constexpr):
    """The listed tokens in one piece, in the order of their ids: logits and ids."""
    end, total = tl.cumsum(count, 0), tl.sum(count, 0)
    for at in range(0, total, GATHERED):
        slot = at + tl.arange(0, GATHERED)
        before = (slot[:, None] >= end[None, :]).to(tl.int32)  # the segments that lie before
        segment, there = tl.sum(before, 1), slot - tl.sum(before * count[None, :], 1)
        ids = tl.load(list_ptr + segment * SEGMENT + there, mask=slot < total, other=0)
        tl.store(ids_ptr + slot, ids, mask=slot < total)
        tl.store(tokens_ptr + slot, tl.load(row_ptr + ids, mask=slot < total), mask=slot < total)
    tl.debug_barrier()  # other threads of the program read them
    return total


@triton.jit
def _load(tokens_ptr, at, total, floor, TILE: tl.constexpr):
    """A tile's logits, -inf under the floor, and their keys."""
    slot = at + tl.arange(0, TILE)
    x = tl.load(tokens_ptr + slot, mask=slot < total, other=float("-inf"))
    x = tl.where(x >= floor, x, float("-inf"))
    return x, ordered(x)


@triton.jit
def _within(keys, threshold, room, ties):
    """Which keys are over the threshold or among the first ``room`` equal to it, and the equal ones seen so far.
    Negative room is for all."""
    kept = keys >= threshold
    if room >= 0:
        equal = (keys == threshold).to(tl.int32)
        kept = (keys > threshold) | ((equal == 1) & (ties + tl.cumsum(equal, 0) <= room))
        ties += tl.sum(equal, 0)
    return kept, ties


@triton.jit
def _amounts(x, keys, peak, scale, k_threshold, k_room, ties, WEIGH: tl.constexpr):
    """What each token of a tile counts: one, or its weight if top-k keeps it; and top-k's ties seen so far."""
    if WEIGH:
        kept, ties = _within(keys, k_threshold, k_room, ties)
        amount = tl.where(kept, tl.exp((x - peak) * scale), 0.0)
    else:
        amount = tl.where(x > float("-inf"), 1.0, 0.0)
    return amount, ties


@triton.jit
def _sum(tokens_ptr, total, floor, peak, scale, k_threshold, k_room, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """What all tokens count together."""
    sums = tl.zeros([TILE], tl.float32)
    ties = tl.full([], 0, tl.int32)
    for at in range(0, total, TILE):
        x, keys = _load(tokens_ptr, at, total, floor, TILE)
        amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, WEIGH)
        sums += amount
    return tl.sum(sums, 0)


@triton.jit
def _threshold(
    tokens_ptr, total, floor, low, wanted, peak, scale, k_threshold, k_room, WEIGH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest key, not under that of ``low``, at or above which ``wanted`` lies (the least if there is none), and
    how many tokens equal to it are needed (negative: all). The keys in question are split in POINTS + 1 every time."""
    found, last = ordered(low), ordered(peak)
    step = tl.arange(0, POINTS) + 1
    while found < last:
        width = (last - found) // (POINTS + 1) + 1
        candidates = step.to(tl.uint32) * width  # counted from what was found; far from 2^32, since floats are finite
        sums = tl.zeros([POINTS, TILE], tl.float32)
        ties = tl.full([], 0, tl.int32)
        for at in range(0, total, TILE):
            x, keys = _load(tokens_ptr, at, total, floor, TILE)
            amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, WEIGH)
            beyond = tl.where(keys > found, keys - found, 0)
            sums += tl.where(beyond[None, :] >= candidates[:, None], 1.0, 0.0) * amount[None, :]
        # Candidates grow and their sums fall: the last that is enough is the one.
        best = tl.max(tl.where(tl.sum(sums, 1) >= wanted, step, 0), 0).to(tl.uint32)
        found += best * width
        last = tl.minimum(last, found + width - 1)
    above, single = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    equal, ties = tl.zeros([TILE], tl.int32), tl.full([], 0, tl.int32)
    for at in range(0, total, TILE):
        x, keys = _load(tokens_ptr, at, total, floor, TILE)
        amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, WEIGH)
        above += tl.where(keys > found, amount, 0.0)
        single = tl.maximum(single, tl.where(keys == found, amount, 0.0))
        equal += (keys == found).to(tl.int32)
    weight = tl.max(single, 0)
    room = tl.maximum(tl.ceil((wanted - tl.sum(above, 0)) / tl.where(weight > 0.0, weight, 1.0)), 1.0)
    return found, tl.where(room < tl.sum(equal, 0).to(tl.float32), room, -1.0).to(tl.int32)


@triton.jit
def _keys_kept(
    tokens_ptr, total, floor, low, wanted, top_p, cut_p, cut_k, peak, scale, TILE: tl.constexpr
):  # fmt: skip
    """The thresholds of top-k and top-p, and the room at each. ``wanted`` is that of top-k where there is one."""
    k_threshold, p_threshold = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    k_room, p_room = tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
    if cut_k:
        k_threshold, k_room = _threshold(
            tokens_ptr, total, floor, low, wanted, peak, scale, k_threshold, k_room, False, TILE
        )
    if cut_p:
        if cut_k:
            wanted = top_p * _sum(tokens_ptr, total, floor, peak, scale, k_threshold, k_room, True, TILE)
        wanted = tl.maximum(wanted, TINY)  # never zero: the best token stays
        p_threshold, p_room = _threshold(
            tokens_ptr, total, floor, low, wanted, peak, scale, k_threshold, k_room, True, TILE
        )
    return k_threshold, k_room, p_threshold, p_room


@triton.jit
def _draw_kept(
    tokens_ptr, ids_ptr, listed, total, floor, k_threshold, k_room, p_threshold, p_room,
    seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, score, best, VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best noisy token of those kept, and of the one that is given."""
    k_ties, p_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for at in range(0, total, TILE):
        x, keys = _load(tokens_ptr, at, total, floor, TILE)
        ids = at + tl.arange(0, TILE)
        if listed:
            ids = tl.load(ids_ptr + ids, mask=ids < total, other=VOCAB)
        in_k, k_ties = _within(keys, k_threshold, k_room, k_ties)
        in_p, p_ties = _within(keys, p_threshold, p_room, p_ties)
        bits = random_bits(seeds_ptr, positions_ptr, choices_ptr, row, ids)
        scores = tl.where(in_k & in_p, noisy(bits, x, peak, scale), float("-inf"))
        score, best = better(score, best, scores, ids, VOCAB)
    return score, best


@triton.jit
def resolve_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr, choices_ptr, positions_ptr,
    stats_ptr, argmax_ptr, bounds_ptr, amounts_ptr, score_ptr, best_ptr, count_ptr, list_ptr,
    out_ptr, normalizer_ptr, tokens_ptr, ids_ptr, SEGMENT: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (R,): a token id a row, and the logarithm of the row's sum of exponentials. ``tokens[R, CAPACITY]`` and
    ``ids[R, CAPACITY]`` are scratch."""
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS_PAD)
    here, place = chunk < CHUNKS, row * CHUNKS + chunk
    peaks = chunk_peaks(stats_ptr, row, CHUNKS, CHUNKS_PAD)
    peak = tl.max(peaks, 0)
    exponentials = tl.load(stats_ptr + (row * 3 + 1) * CHUNKS + chunk, mask=here, other=0.0)
    exponentials = tl.where(here, exponentials * tl.exp(peaks - peak), 0.0)
    tl.store(normalizer_ptr + row, peak + tl.log(tl.sum(exponentials, 0)))
    best = tl.min(tl.where(peaks == peak, tl.load(argmax_ptr + place, mask=here, other=VOCAB), VOCAB), 0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        top_p, top_k, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
        scores = tl.load(score_ptr + place, mask=here, other=float("-inf"))
        score = tl.max(scores, 0)
        drawn = tl.min(tl.where(scores == score, tl.load(best_ptr + place, mask=here, other=VOCAB), VOCAB), 0)
        best = tl.where(score > float("-inf"), drawn, best)
        if cut_p | cut_k:
            _, floor = peak_and_floor(stats_ptr, row, temperature, tl.load(min_p_ptr + row), CHUNKS, CHUNKS_PAD)
            scale = scale_of(temperature)
            weight = tl.sum(tl.load(amounts_ptr + 2 * row * CHUNKS + chunk, mask=here, other=0.0), 0)
            above = tl.sum(tl.load(amounts_ptr + (2 * row + 1) * CHUNKS + chunk, mask=here, other=0.0), 0)
            wanted = tl.where(cut_k, top_k.to(tl.float32), tl.maximum(top_p * weight, TINY))
            count = tl.load(count_ptr + place, mask=here, other=0)
            low = tl.load(bounds_ptr + 2 * row)
            row_ptr, row_tokens_ptr = logits_ptr + row.to(tl.int64) * VOCAB, tokens_ptr + row * CAPACITY
            row_ids_ptr = ids_ptr + row * CAPACITY
            k_threshold, k_room = tl.full([], 0, tl.uint32), tl.full([], -1, tl.int32)
            listed = (tl.max(count, 0) <= SEGMENT) & (tl.sum(count, 0) <= CAPACITY) & (above < wanted)
            total = tl.full([], VOCAB, tl.int32)
            if listed:
                list_row_ptr = list_ptr + row.to(tl.int64) * CHUNKS * SEGMENT
                total = _gather(row_ptr, list_row_ptr, count, row_tokens_ptr, row_ids_ptr, SEGMENT)
                between = tl.sum(count, 0).to(tl.float32)
                if cut_p & (cut_k == 0):
                    between = _sum(row_tokens_ptr, total, floor, peak, scale, k_threshold, k_room, True, TILE)
                # Else the cut is below the lower bound.
                listed = (above + between >= wanted) | (low <= floor)
            source_ptr = row_tokens_ptr
            if listed:
                wanted -= above
            else:
                source_ptr, total, low, score = row_ptr, VOCAB, floor, float("-inf")
            k_threshold, k_room, p_threshold, p_room = _keys_kept(
                source_ptr, total, floor, low, wanted, top_p, cut_p, cut_k, peak, scale, TILE
            )
            score, best = _draw_kept(
                source_ptr,
                row_ids_ptr,
                listed,
                total,
                floor,
                k_threshold,
                k_room,
                p_threshold,
                p_room,
                seeds_ptr,
                positions_ptr,
                choices_ptr,
                row,
                peak,
                scale,
                score,
                best,
                VOCAB,
                TILE,
            )
    tl.store(out_ptr + row, tl.minimum(best, VOCAB - 1))  # an id, whatever became of the logits
