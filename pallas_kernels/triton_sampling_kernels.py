"""The kernels of the Triton sampler that share a row among programs; ``triton_sampling`` says how they go together."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_early import enter

PEAK, WEIGHT, GIVEN_PEAK, GIVEN_SUM = (tl.constexpr(kind) for kind in range(4))
"""What ``stats[R, 4, chunks]`` says of a chunk: its largest logit; for top-p alone its weight, which is a sum of
exponentials over temperature, relative to the largest; and, as the model gave the logits, the largest and the sum of
exponentials relative to it, NaN where one is not finite."""
KINDS = tl.constexpr(4)

OF_LOW, OF_SURE, OF_FLOOR = (tl.constexpr(kind) for kind in range(3))
"""What ``amounts[R, 3, chunks]`` are of: all at or above one of these."""

TINY = tl.constexpr(2.0**-126)
LEAST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float."""

LOG2_E = tl.constexpr(1.4426950408889634)

CERTAINTY = tl.constexpr(4.5)
"""Standard deviations of the sample's estimates that are allowed for: a row in 10^5 falls outside, and is slower."""
HOPELESS = tl.constexpr(30.0)
"""So far below the largest score none wins: the noise of 32 bits spans less than 26."""
STEP = tl.constexpr(2.0**-32)
"""Of the uniform numbers."""
HALF_SQUARE = tl.constexpr(2.0**-65)
QUARTER_STEP = tl.constexpr(2.0**-34)
"""Less than what half a step adds to an arrival, which is never zero so."""
NEVER = tl.constexpr(2.0**126)
"""Later than any arrival."""
PIVOT_BITS = tl.constexpr(17)
"""Of a pivot's key: sign, exponent and 8 bits of mantissa."""
PIVOT_STEP = tl.constexpr(1 << 15)
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
def exp(x):
    """Less than half the instructions of ``tl.exp``, which also gives results that are denormal."""
    return tl.exp2(x * LOG2_E)


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
def chunk_stats(stats_ptr, row, kind, other, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """Of all chunks of a row; ``other`` beyond them."""
    chunk = tl.arange(0, CHUNKS_PAD)
    return tl.load(stats_ptr + (row * KINDS + kind) * CHUNKS + chunk, mask=chunk < CHUNKS, other=other)


@triton.jit
def chunk_peaks(stats_ptr, row, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    return chunk_stats(stats_ptr, row, PEAK, float("-inf"), CHUNKS, CHUNKS_PAD)


@triton.jit
def row_weight(stats_ptr, row, peaks, peak, scale, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """Of all tokens of a row, relative to its largest logit."""
    weights = chunk_stats(stats_ptr, row, WEIGHT, 0.0, CHUNKS, CHUNKS_PAD)
    return tl.sum(weights * exp((peaks - peak) * scale), 0)


@triton.jit
def bounds_of(bounds_ptr, row):
    """What ``pivot_kernel`` found: lower and upper bound, the largest logit, the floor."""
    at = bounds_ptr + 4 * row
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _peak_and_floor(stats_ptr, row, temperature, min_p, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """The row's largest logit, and the least that min-p keeps, a finite one: what is -inf is never listed, and an
    infinite bound says that tokens are."""
    peak = tl.max(chunk_peaks(stats_ptr, row, CHUNKS, CHUNKS_PAD), 0)
    floor = tl.full([], LEAST, tl.float32)
    if min_p > 0.0:
        least = peak + temperature * tl.log(min_p)
        floor = tl.where((least > LEAST) & (least < float("inf")), least, LEAST)
    return peak, floor


@triton.jit
def summarize_given(x, ids, row, chunk, stats_ptr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr):
    """Of a chunk as the model gave it, what ``stats`` says of that; and the largest logit."""
    peak, at = tl.max(x, 0), stats_ptr + row * KINDS * CHUNKS + chunk
    finite = (x > float("-inf")) | (ids >= VOCAB)
    tl.store(at + GIVEN_PEAK * CHUNKS, peak)
    tl.store(at + GIVEN_SUM * CHUNKS, tl.sum(tl.where(finite, exp(x - tl.maximum(peak, LEAST)), float("nan")), 0))
    return peak


@triton.jit
def summarize(
    x, peak, ids, row, chunk, temperature, cut_p, cut_k, row_ptr, stats_ptr, best_ptr, sample_ptr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Of a chunk, with its largest logit: the rest of ``stats``, and ``best[R, chunks]``, the lowest id of the largest.
    ``sample[R, SAMPLE]``: of each STRIDE logits one, where the row has a cut."""
    at = stats_ptr + row * KINDS * CHUNKS + chunk
    tl.store(at + PEAK * CHUNKS, peak)
    tl.store(best_ptr + row * CHUNKS + chunk, tl.min(tl.where((ids < VOCAB) & (x == peak), ids, VOCAB), 0))
    if (temperature > 0.0) & (cut_p | cut_k):
        if cut_k == 0:
            tl.store(at + WEIGHT * CHUNKS, tl.sum(exp((x - tl.maximum(peak, LEAST)) * scale_of(temperature)), 0))
        index = chunk * (CHUNK // STRIDE) + tl.arange(0, CHUNK // STRIDE)
        # Not always the first: a vocabulary may have an order.
        taken = tl.load(row_ptr + index * STRIDE + index * 11 % STRIDE, mask=index < SAMPLE, other=float("-inf"))
        tl.store(sample_ptr + row * SAMPLE + index, taken, mask=index < SAMPLE)


@triton.jit
def stats_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, top_k_ptr, stats_ptr, best_ptr, sample_ptr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr, SAMPLE: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (R * chunks,): what ``summarize`` and ``summarize_given`` say of each chunk."""
    if CHAINED:
        enter()
    row, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    _, _, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
    peak = summarize_given(x, ids, row, chunk, stats_ptr, VOCAB, CHUNKS)
    summarize(
        x, peak, ids, row, chunk, temperature, cut_p, cut_k, row_ptr, stats_ptr, best_ptr, sample_ptr,
        VOCAB, CHUNK, CHUNKS, STRIDE, SAMPLE,
    )  # fmt: skip


@triton.jit
def _bracket(
    stats_ptr, sample_ptr, row, temperature, top_p, top_k, cut_p, cut_k, peak, floor,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    SAMPLE: tl.constexpr, SAMPLE_PAD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Two logits between which the cut lies, almost surely, by the sample. The upper one is infinite where no more than
    about LISTED tokens are above the lower.

    A cut by top-k is a rank, about as far down the sample. One by top-p is where what is below adds up to what may go:
    few large weights say little about where that is, and they are not below. Binary search by keys, both at once.
    """
    scale = scale_of(temperature)
    slot = tl.arange(0, SAMPLE_PAD)
    x = tl.load(sample_ptr + row * SAMPLE + slot, mask=slot < SAMPLE, other=float("-inf"))
    valid, keys = x > float("-inf"), ordered(x)
    weights = tl.where(valid, tl.where(cut_k, 1.0, exp((x - peak) * scale)), 0.0)
    number = tl.sum(valid.to(tl.float32), 0)
    each = VOCAB / SAMPLE  # tokens that one of the sample stands for
    rank = tl.maximum(top_k, 0).to(tl.float32) / each
    spread = CERTAINTY * tl.sqrt(rank)
    upper = tl.arange(0, 2) == 1
    wanted = tl.where(upper, rank - spread - 4.0, rank + spread + 6.0)
    peaks = chunk_peaks(stats_ptr, row, CHUNKS, CHUNKS_PAD)
    total = tl.where(cut_k, 0.0, row_weight(stats_ptr, row, peaks, peak, scale, CHUNKS, CHUNKS_PAD))
    dropped = tl.sum(tl.where(x < floor, weights, 0.0), 0)  # by min-p, of the sample
    spare = dropped + (1.0 - top_p) * tl.maximum(total / each - dropped, 0.0)
    # Weights and their squares, for either candidate: one sum of four waits for others once.
    amounts = tl.where(tl.arange(0, 4)[:, None] % 2 == 0, weights[None, :], (weights * weights)[None, :])
    found = tl.zeros([2], tl.uint32)
    least, most = ordered(tl.full([], LEAST, tl.float32)), ordered(peak)
    for bit in range(0, PIVOT_BITS):
        candidate = found | (tl.full([2], 1, tl.uint32) << (31 - bit))
        less = keys[None, :] < tl.reshape(tl.broadcast_to(candidate[:, None], [2, 2]), [4])[:, None]
        below, squares = tl.split(tl.reshape(tl.sum(tl.where(less, amounts, 0.0), 1), [2, 2]))
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
    return low, tl.where(open_ended, float("inf"), tl.maximum(high, floor))


@triton.jit
def pivot_kernel(
    temperature_ptr, top_p_ptr, top_k_ptr, min_p_ptr, stats_ptr, sample_ptr, bounds_ptr,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    SAMPLE: tl.constexpr, SAMPLE_PAD: tl.constexpr, LISTED: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (R,): ``bounds[R, 4]``: two logits between which the cut lies, both the floor if there is none; the largest
    logit; and the floor, the least logit that min-p keeps."""
    if CHAINED:
        enter()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_p, top_k, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
    if temperature > 0.0:
        peak, floor = _peak_and_floor(stats_ptr, row, temperature, tl.load(min_p_ptr + row), CHUNKS, CHUNKS_PAD)
        low, sure = floor, floor
        if cut_p | cut_k:
            low, sure = _bracket(
                stats_ptr, sample_ptr, row, temperature, top_p, top_k, cut_p, cut_k, peak, floor,
                VOCAB, CHUNKS, CHUNKS_PAD, SAMPLE, SAMPLE_PAD, LISTED,
            )  # fmt: skip
        at = bounds_ptr + 4 * row
        tl.store(at, low)
        tl.store(at + 1, sure)
        tl.store(at + 2, peak)
        tl.store(at + 3, floor)


@triton.jit
def random_words(seeds_ptr, positions_ptr, choices_ptr, row, group):
    """Philox's four words for groups of four ids, as in ``philox``; a product's halves are of one instruction."""
    k0, k1 = tl.load(seeds_ptr + 2 * row).to(tl.uint32), tl.load(seeds_ptr + 2 * row + 1).to(tl.uint32)
    zero = (group * 0).to(tl.uint32)
    c0, c1 = group.to(tl.uint32), zero + tl.load(positions_ptr + row).to(tl.uint32)
    c2, c3 = zero + tl.load(choices_ptr + row).to(tl.uint32), zero
    for step in tl.static_range(10):
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        key0, key1 = k0 + (step * 0x9E3779B9) % 2**32, k1 + (step * 0xBB67AE85) % 2**32
        c0, c2 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0, (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def in_turn(a, b, c, d):
    """``a[0], b[0], c[0], d[0], a[1]`` and so on: of groups of four ids, what each has."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def contenders(low, sure, peak, temperature):
    """The least logit that may win with noise, of those at or above ``low``; infinite where these are listed."""
    return tl.where(sure < float("inf"), tl.maximum(low, peak - HOPELESS * temperature), float("inf"))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, top_k_ptr, seeds_ptr, choices_ptr, positions_ptr,
    stats_ptr, bounds_ptr, amounts_ptr, arrival_ptr, best_ptr, count_ptr, list_ptr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SEGMENT: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (R * chunks,). Of the tokens at or above the lower bound the first and second ``arrival[R, 2, chunks]``, and
    the id (``best``) of the first; or, if the upper bound is infinite, their ``count[R, chunks]`` and the first SEGMENT
    ids in ``list[R, chunks, SEGMENT]``. ``amounts[R, 3, chunks]``: the number (for top-k) or weight of those at or
    above the lower bound, and the upper one, if finite; and, with min-p and without top-k, the weight of those that
    min-p keeps.

    The best noisy score is that of the least exponential variate over weight. An arrival is somewhat less than that: it
    has -log(1 - u) by the first terms of its series, so that there are no logarithms to take of all tokens, and not its
    last bits.
    """
    if CHAINED:
        enter()
    row, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        _, _, cut_p, cut_k = cuts(top_p_ptr, top_k_ptr, row, VOCAB)
        low, sure, peak, floor = bounds_of(bounds_ptr, row)
        scale = scale_of(temperature)
        place = row * CHUNKS + chunk
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
        x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
        if cut_p | cut_k:
            amount_at = amounts_ptr + 3 * row * CHUNKS + chunk
            weights = tl.full([CHUNK], 1.0, tl.float32)
            if cut_k == 0:
                weights = exp((x - peak) * scale)
                if floor > LEAST:
                    weights = tl.where(x >= floor, weights, 0.0)
                    tl.store(amount_at + OF_FLOOR * CHUNKS, tl.sum(weights, 0))
            tl.store(amount_at + OF_LOW * CHUNKS, tl.sum(tl.where(x >= low, weights, 0.0), 0))
            if sure < float("inf"):
                tl.store(amount_at + OF_SURE * CHUNKS, tl.sum(tl.where(x >= sure, weights, 0.0), 0))
            else:
                asked = (x >= low).to(tl.int32)
                count = tl.sum(asked, 0)
                tl.store(count_ptr + place, count)
                if count > 0:
                    slot = tl.cumsum(asked, 0) - 1
                    tl.store(list_ptr + place.to(tl.int64) * SEGMENT + slot, ids, mask=(asked == 1) & (slot < SEGMENT))
        first, best = tl.full([], NEVER, tl.float32), tl.full([], VOCAB, tl.int32)
        second, least = first, contenders(low, sure, peak, temperature)
        if tl.load(stats_ptr + (row * KINDS + PEAK) * CHUNKS + chunk) >= least:
            group = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
            bits = in_turn(*random_words(seeds_ptr, positions_ptr, choices_ptr, row, group)).to(tl.float32)
            arrival = (bits * (STEP + bits * HALF_SQUARE) + QUARTER_STEP) * exp((peak - x) * scale)
            # The last bits say whose it is, so that no two are the same.
            last_bits: tl.constexpr = CHUNK - 1
            arrival = tl.where(x >= least, arrival, NEVER).to(tl.int32, bitcast=True)
            arrival = ((arrival & ~last_bits) | (ids & last_bits)).to(tl.float32, bitcast=True)
            first = tl.min(arrival, 0)
            second = tl.min(tl.where(arrival == first, NEVER, arrival), 0)
            best = chunk * CHUNK + (first.to(tl.int32, bitcast=True) & last_bits)
            first = (first.to(tl.int32, bitcast=True) & ~last_bits).to(tl.float32, bitcast=True)
            second = (second.to(tl.int32, bitcast=True) & ~last_bits).to(tl.float32, bitcast=True)
        tl.store(arrival_ptr + 2 * row * CHUNKS + chunk, first)
        tl.store(arrival_ptr + (2 * row + 1) * CHUNKS + chunk, second)
        tl.store(best_ptr + place, best)
