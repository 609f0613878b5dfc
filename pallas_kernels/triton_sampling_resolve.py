"""The last kernel of the Triton sampler: the exact cut, and the token."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_early import enter
from pallas_kernels.triton_sampling_kernels import (
    GIVEN_PEAK,
    GIVEN_SUM,
    LEAST,
    NEVER,
    OF_FLOOR,
    OF_LOW,
    OF_SURE,
    STEP,
    TINY,
    bounds_of,
    chunk_peaks,
    chunk_stats,
    contenders,
    cuts,
    exp,
    ordered,
    random_words,
    row_weight,
    scale_of,
)

ROUNDING = tl.constexpr(1.0001)
"""More than the errors of an arrival."""
POINTS = tl.constexpr(8)
GATHERED = tl.constexpr(16)
"""Of each chunk's list, gathered in one go."""


@triton.jit
def _noisy(bits, x, peak, scale):
    """Scores with Gumbel noise, the logarithm of an exponential variate: with full resolution where that is small,
    which is where the largest noise comes from."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * STEP, 1.0 - 5.9604644775390625e-08)
    series = uniform + uniform * uniform * (0.5 + uniform * (0.3333333333333333 + uniform * 0.25))
    exponential = tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))
    return (x - peak) * scale - tl.log(exponential)


@triton.jit
def _random_bits(seeds_ptr, positions_ptr, choices_ptr, row, ids):
    """Each id's word."""
    a, b, c, d = random_words(seeds_ptr, positions_ptr, choices_ptr, row, ids // 4)
    return tl.where(ids % 4 < 2, tl.where(ids % 4 == 0, a, b), tl.where(ids % 4 == 2, c, d))


@triton.jit
def _better(
    score, best, kept, ids, x, seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB: tl.constexpr
):  # fmt: skip
    """The better of a token and the best of those kept of others, with noise; of equal ones the lowest id."""
    bits = _random_bits(seeds_ptr, positions_ptr, choices_ptr, row, ids)
    scores = tl.where(kept, _noisy(bits, x, peak, scale), float("-inf"))
    highest = tl.max(scores, 0)
    first = tl.min(tl.where(scores == highest, ids, VOCAB), 0)
    best = tl.where((highest > score) | ((highest == score) & (first < best)), first, best)
    return tl.maximum(score, highest), best


@triton.jit
def _gather(row_ptr, list_ptr, count, tokens_ptr, ids_ptr, SEGMENT: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """The listed tokens in one piece, in the order of their ids: logits and ids."""
    start = (tl.cumsum(count, 0) - count)[:, None]
    segment = tl.arange(0, CHUNKS_PAD)[:, None] * SEGMENT
    for at in range(0, tl.max(count, 0), GATHERED):
        slot = at + tl.arange(0, GATHERED)[None, :]
        here = slot < count[:, None]
        ids = tl.load(list_ptr + segment + slot, mask=here, other=0)
        tl.store(ids_ptr + start + slot, ids, mask=here)
        tl.store(tokens_ptr + start + slot, tl.load(row_ptr + ids, mask=here), mask=here)
    tl.debug_barrier()  # other threads of the program read them
    return tl.sum(count, 0)


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
        amount = tl.where(kept, exp((x - peak) * scale), 0.0)
    else:
        amount = tl.where(x > float("-inf"), 1.0, 0.0)
    return amount, ties


@triton.jit
def _sum(tokens_ptr, total, floor, peak, scale, k_threshold, k_room, TILE: tl.constexpr):
    """The weight of all tokens that top-k keeps."""
    sums = tl.zeros([TILE], tl.float32)
    ties = tl.full([], 0, tl.int32)
    for at in range(0, total, TILE):
        x, keys = _load(tokens_ptr, at, total, floor, TILE)
        amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, True)
        sums += amount
    return tl.sum(sums, 0)


@triton.jit
def _threshold(
    tokens_ptr, total, floor, low, wanted, peak, scale, k_threshold, k_room, WEIGH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest key, not under that of ``low``, at or above which ``wanted`` lies (the least if there is none), and
    how many tokens equal to it are needed (negative: all). The keys in question are split in POINTS + 1 every time, and
    end where tokens do."""
    found, last = ordered(low), ordered(peak)
    step = tl.arange(0, POINTS) + 1
    while found < last:
        width = (last - found) // (POINTS + 1) + 1
        candidates = step.to(tl.uint32) * width  # counted from what was found; far from 2^32, since floats are finite
        sums = tl.zeros([POINTS, TILE], tl.float32)
        nearest, farthest = tl.zeros([TILE], tl.uint32) + last, tl.zeros([TILE], tl.uint32) + found
        ties = tl.full([], 0, tl.int32)
        for at in range(0, total, TILE):
            x, keys = _load(tokens_ptr, at, total, floor, TILE)
            amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, WEIGH)
            beyond = tl.where(keys > found, keys - found, 0)
            sums += tl.where(beyond[None, :] >= candidates[:, None], 1.0, 0.0) * amount[None, :]
            nearest = tl.where(keys >= found, tl.minimum(keys, nearest), nearest)
            farthest = tl.where(keys <= last, tl.maximum(keys, farthest), farthest)
        # Candidates grow and their sums fall: the last that is enough is the one.
        best = tl.max(tl.where(tl.sum(sums, 1) >= wanted, step, 0), 0).to(tl.uint32)
        found += best * width
        last = tl.minimum(tl.minimum(last, found + width - 1), tl.max(farthest, 0))
        found = tl.maximum(found, tl.min(nearest, 0))
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
def _keys_kept(tokens_ptr, total, floor, low, wanted, top_p, cut_p, cut_k, peak, scale, TILE: tl.constexpr):
    """The thresholds of top-k and top-p, and the room at each. ``wanted`` is that of top-k where there is one."""
    k_threshold, p_threshold = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    k_room, p_room = tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
    if cut_k:
        k_threshold, k_room = _threshold(
            tokens_ptr, total, floor, low, wanted, peak, scale, k_threshold, k_room, False, TILE
        )
    if cut_p:
        if cut_k:
            wanted = top_p * _sum(tokens_ptr, total, floor, peak, scale, k_threshold, k_room, TILE)
        wanted = tl.maximum(wanted, TINY)  # never zero: the best token stays
        p_threshold, p_room = _threshold(
            tokens_ptr, total, floor, low, wanted, peak, scale, k_threshold, k_room, True, TILE
        )
    return k_threshold, k_room, p_threshold, p_room


@triton.jit
def _draw_kept(
    tokens_ptr, ids_ptr, listed, total, floor, k_threshold, k_room, p_threshold, p_room,
    seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best noisy token of those kept: its score and its id."""
    score, best = tl.full([], float("-inf"), tl.float32), tl.full([], VOCAB, tl.int32)
    k_ties, p_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for at in range(0, total, TILE):
        x, keys = _load(tokens_ptr, at, total, floor, TILE)
        ids = at + tl.arange(0, TILE)
        if listed:
            ids = tl.load(ids_ptr + ids, mask=ids < total, other=VOCAB)
        in_k, k_ties = _within(keys, k_threshold, k_room, k_ties)
        in_p, p_ties = _within(keys, p_threshold, p_room, p_ties)
        score, best = _better(
            score, best, in_k & in_p, ids, x, seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB
        )
    return score, best


@triton.jit
def _draw_exactly(
    row_ptr, tokens_ptr, ids_ptr, listed, total, low, floor, wanted, top_p, cut_p, cut_k,
    seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best noisy token of those that the cuts keep, of a list or of the whole row: its score and its id."""
    source_ptr = row_ptr
    if listed:
        source_ptr = tokens_ptr
    else:
        total, low = tl.full([], VOCAB, tl.int32), floor
    k_threshold, k_room, p_threshold, p_room = _keys_kept(
        source_ptr, total, floor, low, wanted, top_p, cut_p, cut_k, peak, scale, TILE
    )
    return _draw_kept(
        source_ptr, ids_ptr, listed, total, floor, k_threshold, k_room, p_threshold, p_room,
        seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB, TILE,
    )  # fmt: skip


@triton.jit
def _ahead(x, ids, key, token):
    """Which tokens are ahead of one with this key: by their logits or, of equal ones, by their ids."""
    keys = ordered(x)
    return (keys > key) | ((keys == key) & (ids < token))


@triton.jit
def _draw_ahead(
    row_ptr, arrival_ptr, best_ptr, least, key, token, seeds_ptr, positions_ptr, choices_ptr, row, peak, scale,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best noisy token of those at or above ``least`` and ``_ahead`` of one with this key (-inf and VOCAB if there
    is none): the best of the chunks' first, unless another token might still beat that, which is rare and looked for in
    its chunk."""
    chunk = tl.arange(0, CHUNKS_PAD)
    here = chunk < CHUNKS
    some = tl.load(arrival_ptr + chunk, mask=here, other=NEVER) < NEVER
    firsts = tl.load(best_ptr + chunk, mask=some, other=0)
    logits = tl.load(row_ptr + firsts)
    score, best = _better(
        float("-inf"), VOCAB, some & _ahead(logits, firsts, key, token), firsts, logits,
        seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB,
    )  # fmt: skip
    # None of a chunk arrives before its second, be its first one of these or not.
    limit = tl.where(score > float("-inf"), ROUNDING * tl.exp(-score), NEVER)
    seconds = tl.load(arrival_ptr + CHUNKS + chunk, mask=here, other=NEVER)
    rival = tl.min(tl.where(seconds < limit, chunk, CHUNKS), 0)
    while rival < CHUNKS:
        for at in range(rival * CHUNK, (rival + 1) * CHUNK, TILE):
            ids = at + tl.arange(0, TILE)
            x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
            score, best = _better(
                score, best, (x >= least) & _ahead(x, ids, key, token), ids, x,
                seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB,
            )  # fmt: skip
        seconds = tl.where(chunk == rival, NEVER, seconds)
        rival = tl.min(tl.where(seconds < limit, chunk, CHUNKS), 0)
    return score, best


@triton.jit
def _is_dropped(row_ptr, logit, token, sure, missing, cut_k, peak, scale, VOCAB: tl.constexpr, WIDE: tl.constexpr):
    """Whether a token below ``sure`` is not kept by the cut, that of top-k or of top-p: those ahead of it are enough,
    even without those above, of which so much is ``missing``."""
    sums, key = tl.zeros([WIDE], tl.float32), ordered(logit)
    for at in tl.range(0, VOCAB, WIDE, num_stages=4):  # a pipeline: else each load waits for the one in front
        ids = at + tl.arange(0, WIDE)
        x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
        ahead = (x < sure) & _ahead(x, ids, key, token)
        sums += tl.where(ahead, tl.where(cut_k, 1.0, exp((x - peak) * scale)), 0.0)
    return tl.sum(sums, 0) >= missing


@triton.jit
def _draw_bounded(
    row_ptr, arrival_ptr, best_ptr, least, sure, missing, cut_k,
    seeds_ptr, positions_ptr, choices_ptr, row, peak, scale,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The best noisy token that is kept: the best of all at or above ``least`` or, if that is dropped, the best of
    those ahead of it (mostly one above ``sure``), and so on."""
    score, best = tl.full([], float("-inf"), tl.float32), tl.full([], VOCAB, tl.int32)
    key, token = tl.full([], 0, tl.uint32), best  # all are ahead
    dropped = True
    while dropped:
        score, best = _draw_ahead(
            row_ptr, arrival_ptr, best_ptr, least, key, token, seeds_ptr, positions_ptr, choices_ptr, row, peak, scale,
            VOCAB, CHUNK, CHUNKS, CHUNKS_PAD, TILE,
        )  # fmt: skip
        logit = tl.load(row_ptr + tl.minimum(best, VOCAB - 1))
        key, token = ordered(logit), best
        dropped = (score > float("-inf")) & (logit < sure)
        if dropped:
            dropped = _is_dropped(row_ptr, logit, best, sure, missing, cut_k, peak, scale, VOCAB, WIDE)
    return score, best


@triton.jit
def _amount(amounts_ptr, kind, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """A row's sum of what ``draw_kernel`` says of its chunks."""
    chunk = tl.arange(0, CHUNKS_PAD)
    return tl.sum(tl.load(amounts_ptr + kind * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), 0)


@triton.jit
def resolve_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, top_k_ptr, seeds_ptr, choices_ptr, positions_ptr,
    stats_ptr, argmax_ptr, bounds_ptr, amounts_ptr, arrival_ptr, best_ptr, count_ptr, list_ptr,
    out_ptr, normalizer_ptr, tokens_ptr, ids_ptr,
    SEGMENT: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (R,): a token id a row, and the logarithm of the sum of exponentials of what the model gave.
    ``tokens[R, CAPACITY]`` and ``ids[R, CAPACITY]`` are scratch."""
    if CHAINED:
        enter()
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS_PAD)
    here, place = chunk < CHUNKS, row * CHUNKS + chunk
    peaks = chunk_peaks(stats_ptr, row, CHUNKS, CHUNKS_PAD)
    given_peaks = chunk_stats(stats_ptr, row, GIVEN_PEAK, float("-inf"), CHUNKS, CHUNKS_PAD)
    sums = chunk_stats(stats_ptr, row, GIVEN_SUM, 0.0, CHUNKS, CHUNKS_PAD)
    peak, given_peak = tl.max(peaks, 0), tl.max(given_peaks, 0)
    sums = tl.where(here, sums * tl.exp(given_peaks - given_peak), 0.0)
    tl.store(normalizer_ptr + row, given_peak + tl.log(tl.sum(sums, 0)))
    best = tl.min(tl.where(peaks == peak, tl.load(argmax_ptr + place, mask=here, other=VOCAB), VOCAB), 0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        top_p, top_k, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
        low, sure, _, floor = bounds_of(bounds_ptr, row)
        scale, row_ptr = scale_of(temperature), logits_ptr + row.to(tl.int64) * VOCAB
        wanted, missing = tl.full([], float("inf"), tl.float32), tl.full([], float("inf"), tl.float32)
        bounded = tl.full([], 1, tl.int1)
        if cut_p | cut_k:
            row_amounts_ptr = amounts_ptr + 3 * row * CHUNKS
            if floor > LEAST:
                weight = _amount(row_amounts_ptr, OF_FLOOR, CHUNKS, CHUNKS_PAD)
            else:
                weight = row_weight(stats_ptr, row, peaks, peak, scale, CHUNKS, CHUNKS_PAD)
            within = _amount(row_amounts_ptr, OF_LOW, CHUNKS, CHUNKS_PAD)
            above = tl.where(sure < float("inf"), _amount(row_amounts_ptr, OF_SURE, CHUNKS, CHUNKS_PAD), 0.0)
            wanted = tl.where(cut_k, top_k.to(tl.float32), tl.maximum(top_p * weight, TINY))
            missing = wanted - above
            bounded = (missing > 0.0) & ((within >= wanted) | (low <= floor))
        if bounded & (sure < float("inf")):
            score, drawn = _draw_bounded(
                row_ptr, arrival_ptr + 2 * row * CHUNKS, best_ptr + row * CHUNKS,
                contenders(low, sure, peak, temperature), sure, missing, cut_k,
                seeds_ptr, positions_ptr, choices_ptr, row, peak, scale,
                VOCAB, CHUNK, CHUNKS, CHUNKS_PAD, TILE, WIDE,
            )  # fmt: skip
        else:
            row_tokens_ptr, row_ids_ptr = tokens_ptr + row * CAPACITY, ids_ptr + row * CAPACITY
            count, total = tl.load(count_ptr + place, mask=here, other=0), tl.full([], 0, tl.int32)
            listed = bounded & (tl.max(count, 0) <= SEGMENT) & (tl.sum(count, 0) <= CAPACITY)
            if listed:
                list_row_ptr = list_ptr + row.to(tl.int64) * CHUNKS * SEGMENT
                total = _gather(row_ptr, list_row_ptr, count, row_tokens_ptr, row_ids_ptr, SEGMENT, CHUNKS_PAD)
            score, drawn = _draw_exactly(
                row_ptr, row_tokens_ptr, row_ids_ptr, listed, total, low, floor, wanted, top_p, cut_p, cut_k,
                seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB, TILE,
            )  # fmt: skip
        best = tl.where(score > float("-inf"), drawn, best)
    tl.store(out_ptr + row, tl.minimum(best, VOCAB - 1))  # an id, whatever became of the logits
