"""The kernels of the Triton sampler; ``triton_sampling`` says how they go together."""

from __future__ import annotations

import triton
import triton.language as tl

POINTS = tl.constexpr(16)
TINY = tl.constexpr(2.0**-126)


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
    points_out_ptr, sums_out_ptr, FIRST: tl.constexpr, SEGMENT: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks): sixteen ``points[R, 16]``, the first the least that is kept at all, and for each chunk the
    number (for top-k) or the weight (for top-p) of the tokens at or above each, ``sums[R, chunks, 16]``. Where no
    more than SEGMENT tokens are in question they are handed on as they are. The FIRST pass reads neither of the two."""
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
            low, high, _, at_low, at_high = _bracket(points_ptr, sums_ptr, row, top_p, top_k, cut_k, CHUNKS, CHUNKS_PAD)
            # All at or above the lower point if top-p comes after top-k. Else those between; of weights, at most.
            inside = at_low - tl.where(cut_k & cut_p, 0.0, at_high)
            narrow = inside <= tl.where(cut_k, 1.0, tl.exp((low - peak) * scale)) * SEGMENT
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
            low, sure, _, _, _ = _bracket(points_ptr, sums_ptr, row, top_p, top_k, cut_k, CHUNKS, CHUNKS_PAD)
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
def _gather(row_ptr, list_ptr, count, tokens_ptr, ids_ptr, SEGMENT: tl.constexpr, TILE: tl.constexpr):
    """The tokens in question in one piece, in the order of their ids: logits and ids."""
    end, total = tl.cumsum(count, 0), tl.sum(count, 0)
    for at in range(0, total, TILE):
        slot = at + tl.arange(0, TILE)
        before = (slot[:, None] >= end[None, :]).to(tl.int32)  # the segments that lie before
        segment, there = tl.sum(before, 1), slot - tl.sum(before * count[None, :], 1)
        ids = tl.load(list_ptr + segment * SEGMENT + there, mask=slot < total, other=0)
        tl.store(ids_ptr + slot, ids, mask=slot < total)
        tl.store(tokens_ptr + slot, tl.load(row_ptr + ids, mask=slot < total), mask=slot < total)
    tl.debug_barrier()  # other threads of the program read them
    return total


@triton.jit
def _load(tokens_ptr, at, total, floor, TILE: tl.constexpr):
    """A tile's logits (none under the floor), and these as uint32 that order as the floats do."""
    slot = at + tl.arange(0, TILE)
    x = tl.load(tokens_ptr + slot, mask=slot < total, other=float("-inf"))
    x = tl.where(x >= floor, x, float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    return x, tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


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
def _threshold(
    tokens_ptr, total, floor, wanted, peak, scale, k_threshold, k_room, WEIGH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest key at or above which ``wanted`` lies, and how many tokens equal to it are needed (negative: all).
    Four bits at a time."""
    found = tl.full([], 0, tl.uint32)
    step = tl.arange(0, POINTS)
    for digit in range(0, 8):
        shift = 28 - 4 * digit
        candidates = found | (step << shift).to(tl.uint32)
        sums = tl.zeros([POINTS, TILE], tl.float32)
        ties = tl.full([], 0, tl.int32)
        for at in range(0, total, TILE):
            x, keys = _load(tokens_ptr, at, total, floor, TILE)
            amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, WEIGH)
            sums += tl.where(keys[None, :] >= candidates[:, None], 1.0, 0.0) * amount[None, :]
        # Candidates grow and their sums fall: the last that is enough is the one.
        best = tl.max(tl.where(tl.sum(sums, 1) >= wanted, step, 0), 0)
        found |= (best << shift).to(tl.uint32)
    above, single = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    equal, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for at in range(0, total, TILE):
        x, keys = _load(tokens_ptr, at, total, floor, TILE)
        amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, WEIGH)
        above += tl.sum(tl.where(keys > found, amount, 0.0), 0)
        single = tl.maximum(single, tl.max(tl.where(keys == found, amount, 0.0), 0))
        equal += tl.sum((keys == found).to(tl.int32), 0)
    room = tl.maximum(tl.ceil((wanted - above) / tl.where(single > 0.0, single, 1.0)), 1.0)
    return found, tl.where(room < equal.to(tl.float32), room, -1.0).to(tl.int32)


@triton.jit
def resolve_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr, choices_ptr, positions_ptr,
    stats_ptr, argmax_ptr, points_ptr, sums_ptr, score_ptr, best_ptr, count_ptr, list_ptr,
    out_ptr, tokens_ptr, ids_ptr, SEGMENT: tl.constexpr, CAPACITY: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (R,): a token id a row. ``tokens[R, CAPACITY]`` and ``ids[R, CAPACITY]`` are scratch."""
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS_PAD)
    temperature = tl.load(temperature_ptr + row)
    here, place = chunk < CHUNKS, row * CHUNKS + chunk
    if temperature > 0.0:
        top_p, top_k, cut_p, cut_k = _cuts(top_p_ptr, top_k_ptr, row, VOCAB)
        scores = tl.load(score_ptr + place, mask=here, other=float("-inf"))
        score = tl.max(scores, 0)
        best = tl.min(tl.where(scores == score, tl.load(best_ptr + place, mask=here, other=VOCAB), VOCAB), 0)
        if cut_p | cut_k:
            peak, floor, _ = _range(stats_ptr, row, temperature, tl.load(min_p_ptr + row), CHUNKS, CHUNKS_PAD)
            scale = 1.0 / tl.maximum(temperature, 1e-30)
            _, _, wanted, _, at_high = _bracket(points_ptr, sums_ptr, row, top_p, top_k, cut_k, CHUNKS, CHUNKS_PAD)
            count = tl.load(count_ptr + place, mask=here, other=0)
            row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
            listed = (tl.max(count, 0) <= SEGMENT) & (tl.sum(count, 0) <= CAPACITY)
            source_ptr, source_ids_ptr, total = row_ptr, ids_ptr + row * CAPACITY, VOCAB
            if listed:
                source_ptr = tokens_ptr + row * CAPACITY
                list_row_ptr = list_ptr + row.to(tl.int64) * CHUNKS * SEGMENT
                total = _gather(row_ptr, list_row_ptr, count, source_ptr, source_ids_ptr, SEGMENT, TILE)
                wanted -= tl.where(cut_p & cut_k, 0.0, at_high)
            k_threshold, p_threshold = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
            k_room, p_room = tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
            if cut_k:
                k_threshold, k_room = _threshold(
                    source_ptr, total, floor, wanted, peak, scale, k_threshold, k_room, False, TILE
                )
            if cut_p:
                if cut_k:
                    mass = 0.0
                    ties = tl.full([], 0, tl.int32)
                    for at in range(0, total, TILE):
                        x, keys = _load(source_ptr, at, total, floor, TILE)
                        amount, ties = _amounts(x, keys, peak, scale, k_threshold, k_room, ties, True)
                        mass += tl.sum(amount, 0)
                    wanted = top_p * mass
                wanted = tl.maximum(wanted, TINY)  # never zero: the best token stays
                p_threshold, p_room = _threshold(
                    source_ptr, total, floor, wanted, peak, scale, k_threshold, k_room, True, TILE
                )
            k_ties, p_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
            for at in range(0, total, TILE):
                x, keys = _load(source_ptr, at, total, floor, TILE)
                ids = at + tl.arange(0, TILE)
                if listed:
                    ids = tl.load(source_ids_ptr + ids, mask=ids < total, other=VOCAB)
                in_k, k_ties = _within(keys, k_threshold, k_room, k_ties)
                in_p, p_ties = _within(keys, p_threshold, p_room, p_ties)
                a, b, c, d = _random(seeds_ptr, positions_ptr, choices_ptr, row, ids // 4)
                bits = tl.where(ids % 4 < 2, tl.where(ids % 4 == 0, a, b), tl.where(ids % 4 == 2, c, d))
                noisy = tl.where(in_k & in_p, _noisy(bits, x, peak, scale), float("-inf"))
                highest = tl.max(noisy, 0)
                first = tl.min(tl.where(noisy == highest, ids, VOCAB), 0)
                best = tl.where((highest > score) | ((highest == score) & (first < best)), first, best)
                score = tl.maximum(score, highest)
    else:
        peaks = tl.load(stats_ptr + row * 2 * CHUNKS + chunk, mask=here, other=float("-inf"))
        ids = tl.load(argmax_ptr + place, mask=here, other=VOCAB)
        best = tl.min(tl.where(peaks == tl.max(peaks, 0), ids, VOCAB), 0)
    tl.store(out_ptr + row, tl.minimum(best, VOCAB - 1))  # an id, whatever became of the logits
