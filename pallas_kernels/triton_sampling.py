"""The sampler in Triton: one program a row, a few passes over it, no sort.

Thresholds are found four bits at a time: a pass counts (for top-k) or weighs (for top-p) what lies at or above sixteen
candidates at once. The kept set, the noise and the ties are those of ``sampling``, the reference.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.sampling import SamplingRows

Array = jax.Array

TILE = 2048


@triton.jit
def _load(row_ptr, at, TILE: tl.constexpr, VOCAB: tl.constexpr):
    """A tile's ids, logits, and these as uint32 that order as the floats do."""
    ids = at + tl.arange(0, TILE)
    x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    return ids, x, tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _within(keys, threshold, room, ties):
    """Which keys are over the threshold or among the first ``room`` equal to it, and the equal ones seen so far."""
    equal = (keys == threshold).to(tl.int32)
    return (keys > threshold) | ((equal == 1) & (ties + tl.cumsum(equal, 0) <= room)), ties + tl.sum(equal, 0)


@triton.jit
def _amounts(
    ids, x, keys, ties, peak, temperature, min_p, k_threshold, k_room, WEIGH: tl.constexpr, VOCAB: tl.constexpr
):  # fmt: skip
    """What each token of a tile counts: one, or its weight if min-p and top-k keep it; and top-k's ties seen so far."""
    if WEIGH:
        kept, ties = _within(keys, k_threshold, k_room, ties)
        weight = tl.exp(x / temperature - peak / temperature)
        amount = tl.where(kept & (weight >= min_p), weight, 0.0)
    else:
        amount = tl.where(ids < VOCAB, 1.0, 0.0)
    return amount, ties


@triton.jit
def _threshold(
    row_ptr, wanted, peak, temperature, min_p, k_threshold, k_room,
    WEIGH: tl.constexpr, TILE: tl.constexpr, VOCAB: tl.constexpr,
):  # fmt: skip
    """The largest key at or above which ``wanted`` lies, and how many tokens equal to it are needed."""
    found = tl.full([], 0, tl.uint32)
    step = tl.arange(0, 16)
    for digit in range(0, 8):
        shift = 28 - 4 * digit
        candidates = found | (step << shift).to(tl.uint32)
        sums = tl.zeros([16, TILE], tl.float32)
        ties = tl.full([], 0, tl.int32)
        for at in range(0, VOCAB, TILE):
            ids, x, keys = _load(row_ptr, at, TILE, VOCAB)
            amount, ties = _amounts(ids, x, keys, ties, peak, temperature, min_p, k_threshold, k_room, WEIGH, VOCAB)
            sums += tl.where(keys[None, :] >= candidates[:, None], amount[None, :], 0.0)
        # Candidates grow and their sums fall: the last that is enough is the one.
        best = tl.max(tl.where(tl.sum(sums, 1) >= wanted, step, 0), 0)
        found |= (best << shift).to(tl.uint32)
    above, single = 0.0, 0.0
    ties = tl.full([], 0, tl.int32)
    for at in range(0, VOCAB, TILE):
        ids, x, keys = _load(row_ptr, at, TILE, VOCAB)
        amount, ties = _amounts(ids, x, keys, ties, peak, temperature, min_p, k_threshold, k_room, WEIGH, VOCAB)
        above += tl.sum(tl.where(keys > found, amount, 0.0), 0)
        single = tl.maximum(single, tl.max(tl.where(keys == found, amount, 0.0), 0))
    return found, tl.maximum(tl.ceil((wanted - above) / single), 1.0).to(tl.int32)


@triton.jit
def _exponential(seed, position, choice, at, TILE: tl.constexpr):
    """Exponential variates of a tile's ids, with full resolution where they are small: those win."""
    group = (at // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zero = group * 0
    a, b, c, d = tl.philox(seed, group, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(uniform < 0.0001, uniform + uniform * uniform * 0.5, -tl.log(1.0 - uniform))


@triton.jit
def sample_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seeds_ptr, choices_ptr, positions_ptr, out_ptr,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (R,): a token id a row."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    top_p, top_k = tl.load(top_p_ptr + row), tl.load(top_k_ptr + row)
    peak, best = float("-inf"), VOCAB
    for at in range(0, VOCAB, TILE):
        ids, x, _ = _load(row_ptr, at, TILE, VOCAB)
        highest = tl.max(x, 0)
        best = tl.where(highest > peak, tl.min(tl.where(x == highest, ids, VOCAB), 0), best)
        peak = tl.maximum(peak, highest)
    if temperature > 0.0:
        k_threshold, p_threshold = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
        k_room, p_room = tl.full([], VOCAB, tl.int32), tl.full([], VOCAB, tl.int32)
        if (top_k > 0) & (top_k < VOCAB):
            k_threshold, k_room = _threshold(
                row_ptr, top_k.to(tl.float32), peak, temperature, min_p, k_threshold, k_room, False, TILE, VOCAB
            )
        if top_p < 1.0:
            mass = 0.0
            ties = tl.full([], 0, tl.int32)
            for at in range(0, VOCAB, TILE):
                ids, x, keys = _load(row_ptr, at, TILE, VOCAB)
                amount, ties = _amounts(ids, x, keys, ties, peak, temperature, min_p, k_threshold, k_room, True, VOCAB)
                mass += tl.sum(amount, 0)
            wanted = tl.maximum(top_p * mass, 1.17549435e-38)  # never zero: the best token stays
            p_threshold, p_room = _threshold(
                row_ptr, wanted, peak, temperature, min_p, k_threshold, k_room, True, TILE, VOCAB
            )
        low, high = tl.load(seeds_ptr + 2 * row), tl.load(seeds_ptr + 2 * row + 1)
        seed = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        position, choice = tl.load(positions_ptr + row), tl.load(choices_ptr + row)
        winner = float("-inf")
        k_ties, p_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for at in range(0, VOCAB, TILE):
            ids, x, keys = _load(row_ptr, at, TILE, VOCAB)
            in_k, k_ties = _within(keys, k_threshold, k_room, k_ties)
            in_p, p_ties = _within(keys, p_threshold, p_room, p_ties)
            score = x / temperature - peak / temperature
            kept = in_k & in_p & (tl.exp(score) >= min_p) & (ids < VOCAB)
            noisy = score - tl.log(_exponential(seed, position, choice, at, TILE))
            noisy = tl.where(kept, noisy, float("-inf"))
            highest = tl.max(noisy, 0)
            best = tl.where(highest > winner, tl.min(tl.where(noisy == highest, ids, VOCAB), 0), best)
            winner = tl.maximum(winner, highest)
    tl.store(out_ptr + row, best)


def sample(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    import jax_triton

    count, vocab = logits.shape
    result: Any = jax_triton.triton_call(
        logits, rows.temperature, rows.top_p, rows.min_p, rows.top_k, rows.seeds, rows.choices, positions,
        kernel=sample_kernel, grid=(count,), num_warps=16, out_type=jax.ShapeDtypeStruct((count,), jnp.int32),
        VOCAB=vocab, TILE=TILE,
    )  # fmt: skip
    return result
