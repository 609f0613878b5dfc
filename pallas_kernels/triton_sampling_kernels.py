"""The kernels of the Triton sampler that share a row among programs; ``triton_sampling`` says how they go together."""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-126)
LEAST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float."""

CERTAINTY = tl.constexpr(4.5)
"""Standard deviations of the sample's estimates that are allowed for: a row in 10^5 falls outside, and is slower."""
HOPELESS = tl.constexpr(30.0)
"""So far below the largest score none wins: the noise of 32 bits spans less than 26."""
ROUNDING = tl.constexpr(1.0001)
"""More than all errors of comparing without logarithms."""
PART = tl.constexpr(256)
"""Of a chunk, looked at in one go where all of it needs logarithms."""
PIVOT_BITS = tl.constexpr(22)
"""Of a pivot's key: sign, exponent and 13 bits of mantissa."""
PIVOT_STEP = tl.constexpr(1 << 10)
"""What its other bits leave open."""


@triton.jit
def cuts(top_p_ptr, top_k_ptr, row, VOCAB: tl.constexpr):
    """top-p and top-k of a row, and whether it wants them."""
    top_p, top_k = tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
    return top_p, top_k, top_p < 1.0, (top_k > 0) & (top_k < VOCAB)


@triton.jit
def scale_of(temperature):
    return 1.0 / tl.maximum(temperature, 1e-30)


@triton.jit
def ordered(x):
    """uint32 that order as the floats do."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _float_of(key):
    """The float that ``ordered`` gave this."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def chunk_peaks(stats_ptr, row, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    chunk = tl.arange(0, CHUNKS_PAD)
    return tl.load(stats_ptr + row * 3 * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))


@triton.jit
def peak_and_floor(stats_ptr, row, temperature, min_p, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """The row's largest logit, and the least that min-p keeps, a finite one: what is -inf is never listed."""
    peak = tl.max(chunk_peaks(stats_ptr, row, CHUNKS, CHUNKS_PAD), 0)
    floor = tl.full([], LEAST, tl.float32)
    if min_p > 0.0:
        floor = tl.maximum(floor, peak + temperature * tl.log(min_p))
    return peak, floor


@triton.jit
def exponentials(x, ids, VOCAB: tl.constexpr):
    """The largest of a chunk's logits, and the sum of exponentials relative to it, NaN where one is not finite."""
    peak = tl.max(x, 0)
    finite = (x > float("-inf")) | (ids >= VOCAB)
    return peak, tl.sum(tl.where(finite, tl.exp(x - tl.maximum(peak, LEAST)), float("nan")), 0)


@triton.jit
def stats_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, top_k_ptr, stats_ptr, best_ptr, sample_ptr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks). ``stats[R, 3, chunks]``: the largest logit; the sum of exponentials relative to it, NaN where a
    logit is not finite; and that of the weights, which are exponentials over temperature. ``best[R, chunks]``: the
    lowest id of the largest. ``sample[R, SAMPLE]``: of each STRIDE logits one, where the row has a cut."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + ids, mask=inside, other=float("-inf"))
    peak, total = exponentials(x, ids, VOCAB)
    best = tl.min(tl.where(inside & (x == peak), ids, VOCAB), 0)
    place = row * CHUNKS + chunk
    at = stats_ptr + row * 3 * CHUNKS + chunk
    tl.store(at, peak)
    tl.store(at + CHUNKS, total)
    tl.store(best_ptr + place, best)
    temperature = tl.load(temperature_ptr + row)
    _, _, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
    if (temperature > 0.0) & (cut_p | cut_k):
        tl.store(at + 2 * CHUNKS, tl.sum(tl.exp((x - tl.maximum(peak, LEAST)) * scale_of(temperature)), 0))
        # Not always the first: a vocabulary may have an order.
        index = ids // STRIDE
        taken = (ids % STRIDE == index * 11 % STRIDE) & (index < SAMPLE)
        tl.store(sample_ptr + row * SAMPLE + index, x, mask=taken)


@triton.jit
def pivot_kernel(
    temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, stats_ptr, sample_ptr, bounds_ptr,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    SAMPLE: tl.constexpr, SAMPLE_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Grid (R,): ``bounds[R, 2]``, logits between which the cut lies, almost surely, by the sample. The upper one is
    infinite where no more than about LISTED tokens are above the lower.

    A cut by top-k is a rank, about as far down the sample. One by top-p is where what is below adds up to what may go:
    few large weights say little about where that is, and they are not below. Binary search by keys, both at once.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_p, top_k, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
    if (temperature > 0.0) & (cut_p | cut_k):
        scale = scale_of(temperature)
        peak, floor = peak_and_floor(stats_ptr, row, temperature, tl.load(min_p_ptr + row), CHUNKS, CHUNKS_PAD)
        slot, chunk = tl.arange(0, SAMPLE_PAD), tl.arange(0, CHUNKS_PAD)
        x = tl.load(sample_ptr + row * SAMPLE + slot, mask=slot < SAMPLE, other=float("-inf"))
        valid, keys = x > float("-inf"), ordered(x)
        weights = tl.where(valid, tl.where(cut_k, 1.0, tl.exp((x - peak) * scale)), 0.0)
        number = tl.sum(valid.to(tl.float32), 0)
        each = VOCAB / SAMPLE  # tokens that one of the sample stands for
        rank = tl.maximum(top_k, 0).to(tl.float32) / each
        spread = CERTAINTY * tl.sqrt(rank)
        upper = tl.arange(0, 2) == 1
        wanted = tl.where(upper, rank - spread - 4.0, rank + spread + 6.0)
        peaks = chunk_peaks(stats_ptr, row, CHUNKS, CHUNKS_PAD)
        sums = tl.load(stats_ptr + (row * 3 + 2) * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
        total = tl.sum(sums * tl.exp((peaks - peak) * scale), 0)
        dropped = tl.sum(tl.where(x < floor, weights, 0.0), 0)  # by min-p, of the sample
        spare = dropped + (1.0 - top_p) * tl.maximum(total / each - dropped, 0.0)
        found = tl.zeros([2], tl.uint32)
        least, most = ordered(tl.full([], LEAST, tl.float32)), ordered(peak)
        for bit in range(0, PIVOT_BITS):
            candidate = found | (tl.full([2], 1, tl.uint32) << (31 - bit))
            less = keys[None, :] < candidate[:, None]
            below = tl.sum(tl.where(less, weights[None, :], 0.0), 1)
            squares = tl.sum(tl.where(less, weights[None, :] * weights[None, :], 0.0), 1)
            deviation = CERTAINTY * tl.sqrt(tl.maximum(squares - below * below / tl.maximum(number, 1.0), 0.0))
            # The sample may have missed the few below that there are, none heavier than the candidate.
            distance = tl.maximum(_float_of(tl.minimum(tl.maximum(candidate, least), most)) - peak, -1e30)
            heaviest = tl.exp(distance * scale)
            bound = tl.where(upper, below - deviation, below + deviation + 2.0 * CERTAINTY * heaviest)
            holds = tl.where(cut_k, number - below >= wanted, bound <= spare)
            found = tl.where(holds & (candidate <= most), candidate, found)
        found = tl.maximum(found, least)
        low = tl.maximum(_float_of(tl.max(tl.where(upper, 0, found), 0)), floor)
        high = _float_of(tl.max(tl.where(upper, found, 0), 0) + PIVOT_STEP)
        few = tl.sum((x >= low).to(tl.float32), 0) * each <= LISTED
        open_ended = few | (cut_k & cut_p) | (cut_k & (rank - spread - 4.0 < 1.0))
        tl.store(bounds_ptr + 2 * row, low)
        tl.store(bounds_ptr + 2 * row + 1, tl.where(open_ended, float("inf"), tl.maximum(high, floor)))


@triton.jit
def _uniform(bits):
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def noisy(bits, x, peak, scale):
    """Scores with Gumbel noise, the logarithm of an exponential variate: with full resolution where that is small,
    which is where the largest noise comes from."""
    uniform = tl.minimum(_uniform(bits), 1.0 - 5.9604644775390625e-08)
    series = uniform + uniform * uniform * (0.5 + uniform * (0.3333333333333333 + uniform * 0.25))
    exponential = tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))
    return (x - peak) * scale - tl.log(exponential)


@triton.jit
def random_words(seeds_ptr, positions_ptr, choices_ptr, row, group):
    """Philox's four words for groups of four ids."""
    low, high = tl.load(seeds_ptr + 2 * row), tl.load(seeds_ptr + 2 * row + 1)
    seed = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    zero = (group * 0).to(tl.uint32)
    position, choice = tl.load(positions_ptr + row).to(tl.uint32), tl.load(choices_ptr + row).to(tl.uint32)
    return tl.philox(seed, group.to(tl.uint32), zero + position, zero + choice, zero)


@triton.jit
def random_bits(seeds_ptr, positions_ptr, choices_ptr, row, ids):
    """Each id's word."""
    a, b, c, d = random_words(seeds_ptr, positions_ptr, choices_ptr, row, ids // 4)
    return tl.where(ids % 4 < 2, tl.where(ids % 4 == 0, a, b), tl.where(ids % 4 == 2, c, d))


@triton.jit
def better(score, best, scores, ids, VOCAB: tl.constexpr):
    """The better of a token and the best of others; of equal ones the lowest id."""
    highest = tl.max(scores, 0)
    first = tl.min(tl.where(scores == highest, ids, VOCAB), 0)
    best = tl.where((highest > score) | ((highest == score) & (first < best)), first, best)
    return tl.maximum(score, highest), best


@triton.jit
def _race(
    row_ptr, x, chunk, sure, seeds_ptr, positions_ptr, choices_ptr, row, peak, scale,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Noisy score and id of a chunk's best token of those at or above ``sure``; there is one.

    The best noisy score is the least of variate over weight. A variate is hardly more than its uniform number where
    that is small, and never less: the logarithms are taken of the winner by uniform numbers alone, and only if another
    could still beat it, once in thousands of chunks, of all.
    """
    group = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    a, b, c, d = random_words(seeds_ptr, positions_ptr, choices_ptr, row, group)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    arrival = tl.where(x >= sure, _uniform(bits) * tl.exp((peak - x) * scale), float("inf"))
    first = tl.min(arrival, 0)
    best = tl.minimum(tl.min(tl.where(arrival == first, ids, VOCAB), 0), VOCAB - 1)
    bits_of_best = random_bits(seeds_ptr, positions_ptr, choices_ptr, row, best)
    score = noisy(bits_of_best, tl.load(row_ptr + best), peak, scale)
    if tl.sum((arrival <= tl.exp(-score) * ROUNDING).to(tl.int32), 0) > 1:
        for at in range(chunk * CHUNK, (chunk + 1) * CHUNK, PART):
            part = at + tl.arange(0, PART)
            logits = tl.load(row_ptr + part, mask=part < VOCAB, other=float("-inf"))
            part_bits = random_bits(seeds_ptr, positions_ptr, choices_ptr, row, part)
            scores = tl.where(logits >= sure, noisy(part_bits, logits, peak, scale), float("-inf"))
            score, best = better(score, best, scores, part, VOCAB)
    return score, best


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr, choices_ptr, positions_ptr,
    stats_ptr, bounds_ptr, amounts_ptr, score_ptr, best_ptr, count_ptr, list_ptr, SEGMENT: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks). Noisy ``score`` and id (``best``) of the best token at or above the upper bound; the ids of
    those between the bounds: their ``count[R, chunks]``, and the first SEGMENT in ``list[R, chunks, SEGMENT]``; and
    ``amounts[R, 2, chunks]``: the weight of all tokens, and the number (for top-k) or weight of those above."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        _, _, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
        peak, floor = peak_and_floor(stats_ptr, row, temperature, tl.load(min_p_ptr + row), CHUNKS, CHUNKS_PAD)
        scale = scale_of(temperature)
        place = row * CHUNKS + chunk
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
        x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
        sure = floor
        if cut_p | cut_k:
            low, sure = tl.load(bounds_ptr + 2 * row), tl.load(bounds_ptr + 2 * row + 1)
            weights = tl.where(x >= floor, tl.exp((x - peak) * scale), 0.0)
            amount = tl.where(x >= sure, tl.where(cut_k, 1.0, weights), 0.0)
            tl.store(amounts_ptr + 2 * row * CHUNKS + chunk, tl.sum(weights, 0))
            tl.store(amounts_ptr + (2 * row + 1) * CHUNKS + chunk, tl.sum(amount, 0))
            asked = ((x >= low) & (x < sure)).to(tl.int32)
            count = tl.sum(asked, 0)
            tl.store(count_ptr + place, count)
            if count > 0:
                slot = tl.cumsum(asked, 0) - 1
                tl.store(list_ptr + place.to(tl.int64) * SEGMENT + slot, ids, mask=(asked == 1) & (slot < SEGMENT))
        score, best = tl.full([], float("-inf"), tl.float32), tl.full([], VOCAB, tl.int32)
        sure = tl.maximum(sure, peak - HOPELESS * temperature)
        if tl.load(stats_ptr + row * 3 * CHUNKS + chunk) >= sure:
            score, best = _race(
                row_ptr, x, chunk, sure, seeds_ptr, positions_ptr, choices_ptr, row, peak, scale, VOCAB, CHUNK
            )
        tl.store(score_ptr + place, score)
        tl.store(best_ptr + place, best)
