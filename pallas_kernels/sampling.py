"""Choosing tokens: among the likeliest if that is all that may be chosen, else without sorting, by thresholds that are
found bit by bit. Ties go to the lowest id."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.philox import token_bits, vocabulary_bits

Array = jax.Array

LISTED = 1024


class SamplingRows(NamedTuple):
    """Sampling parameters of R rows."""

    temperature: Array  # float32 [R]; 0 is greedy
    top_p: Array  # float32 [R]; 1 keeps all, 0 keeps the best
    min_p: Array  # float32 [R]; 0 keeps all
    top_k: Array  # int32 [R]; 0 or less keeps all
    seeds: Array  # int32 [R, 2], low and high word
    choices: Array  # int32 [R]


def sample(logits: Array, rows: SamplingRows, positions: Array, stats: tuple[Array, ...] = ()) -> tuple[Array, Array]:
    """One token id a row, int32 ``[R]``, from float32 ``logits[R, V]``, and the logarithm of each row's sum of
    exponentials, float32 ``[R]``, NaN where a logit is not finite. ``positions[R]`` is where the token will stand.

    Temperature, then min-p, top-k and top-p (over what top-k kept), then Gumbel-max: adding Gumbel noise and taking
    the largest samples the softmax exactly (Maddison et al., arXiv:1411.0030). The noise is Philox's, so the choice
    depends on the row's own logits, seed, choice index and position alone.
    """
    greedy = jnp.argmax(logits, -1).astype(jnp.int32)
    is_random = rows.temperature > 0
    random = lax.cond(is_random.any(), lambda: _draw(logits, rows, positions), lambda: greedy)
    return jnp.where(is_random, random, greedy), stats[0] if stats else log_normalizers(logits)


def log_normalizers(logits: Array) -> Array:
    """The logarithm of each row's sum of exponentials ``[R]``, NaN where one of ``logits[R, V]`` is not finite."""
    return jnp.where(jnp.isfinite(logits).all(-1), jax.nn.logsumexp(logits, -1), jnp.nan)


def _draw(logits: Array, rows: SamplingRows, positions: Array) -> Array:
    # The largest is taken off first, or a tiny temperature would make it infinite.
    scores = logits - logits.max(-1, keepdims=True)
    scores = scores / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    ids, kept, complete = listed(logits, scores, rows)

    def from_list() -> Array:
        bits = token_bits(rows.seeds, rows.choices, positions, ids)
        noisy = jnp.where(kept, jnp.take_along_axis(scores, ids, 1) - _noise(bits), -jnp.inf)
        return jnp.where(noisy == noisy.max(-1, keepdims=True), ids, logits.shape[1]).min(-1)

    def from_all() -> Array:
        bits = vocabulary_bits(rows.seeds, rows.choices, positions, logits.shape[1])
        kept = keep_mask(logits, scores, rows)
        return jnp.argmax(jnp.where(kept, scores, -jnp.inf) - _noise(bits), -1).astype(jnp.int32)

    if ids.shape == logits.shape:
        return from_list()
    return lax.cond((complete | (rows.temperature <= 0)).all(), from_list, from_all)


def _noise(bits: Array) -> Array:
    """What to take off scores: the logarithm of an exponential variate, with full resolution where that is small, which
    is where the largest noise comes from."""
    # Rounded to 1 it would be infinite, and the only token kept would lose to those that are not.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return jnp.log(-jnp.log1p(-uniform))


def listed(logits: Array, scores: Array, rows: SamplingRows) -> tuple[Array, Array, Array]:
    """The likeliest tokens, LISTED of them: ids ``[R, L]``, which of them may be chosen, and for which rows these are
    all that may be. Mostly they are, and looking at them is much less work than at the vocabulary."""
    vocab = logits.shape[1]
    count = min(LISTED, vocab)
    ids = lax.top_k(logits, count)[1]  # of equal ones the lowest ids first
    all_weights = jnp.exp(scores)
    weights = jnp.take_along_axis(all_weights, ids, 1)
    min_p, top_p = rows.min_p[:, None], rows.top_p[:, None]
    top_k = jnp.where(rows.top_k > 0, rows.top_k, vocab)[:, None]
    by_min_p, by_top_k = weights >= min_p, jnp.arange(count) < top_k
    weights = jnp.where(by_min_p & by_top_k, weights, 0.0)
    everything = jnp.where(all_weights >= min_p, all_weights, 0.0).sum(-1, keepdims=True)
    wanted = top_p * jnp.where(top_k <= count, weights.sum(-1, keepdims=True), everything)
    reached = jnp.cumsum(weights, -1)
    # The best token stays at least; and 1.0 keeps all, however the sums round.
    by_top_p = (reached - weights < wanted) | (top_p >= 1.0) | (jnp.arange(count) == 0)
    far_enough = (top_p < 1.0) & (top_k >= vocab) & (reached[:, -1:] >= wanted)
    ends = (top_k <= count) | ~by_min_p[:, -1:] | far_enough
    return ids, by_min_p & by_top_k & by_top_p, (ends | (count == vocab))[:, 0]


def keep_mask(logits: Array, scores: Array, rows: SamplingRows) -> Array:
    """Which tokens may be chosen, bool ``[R, V]``, of ``logits``; ``scores`` are those over temperature, the largest of
    a row 0. Thresholds are on the logits: dividing could make ties of what is none."""
    weights = jnp.exp(scores)
    kept = weights >= rows.min_p[:, None]
    keys = _ordered_bits(logits)
    return lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1.0)),
        lambda: _top_p(_top_k(kept, keys, rows.top_k), keys, weights, rows.top_p),
        lambda: kept,
    )


def _top_k(kept: Array, keys: Array, top_k: Array) -> Array:
    wanted = jnp.where(top_k > 0, top_k, keys.shape[1])[:, None]

    def enough(threshold: Array) -> Array:
        return jnp.sum(keys >= threshold, -1, keepdims=True, dtype=jnp.int32) >= wanted

    threshold = _largest(enough, keys.shape[0])
    room = wanted - jnp.sum(keys > threshold, -1, keepdims=True, dtype=jnp.int32)
    return kept & _above(keys, threshold, room)


def _top_p(kept: Array, keys: Array, weights: Array, top_p: Array) -> Array:
    weights = jnp.where(kept, weights, 0.0)
    # Never zero, so that at least the best token stays; and 1.0 keeps all, however the sums round.
    wanted = jnp.maximum(top_p[:, None] * weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    def enough(threshold: Array) -> Array:
        return jnp.sum(jnp.where(keys >= threshold, weights, 0.0), -1, keepdims=True) >= wanted

    threshold = _largest(enough, keys.shape[0])
    missing = wanted - jnp.sum(jnp.where(keys > threshold, weights, 0.0), -1, keepdims=True)
    weight = jnp.max(jnp.where(keys == threshold, weights, 0.0), -1, keepdims=True)
    room = jnp.maximum(jnp.ceil(missing / weight), 1.0)
    return kept & (_above(keys, threshold, room) | (top_p[:, None] >= 1.0))


def _ordered_bits(x: Array) -> Array:
    """uint32 that order as the floats do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[Array], Array], rows: int) -> Array:
    """The largest uint32 ``[R, 1]`` for which a predicate that holds at 0 and only ever turns false still holds."""

    def refine(step: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, 32, refine, jnp.zeros((rows, 1), jnp.uint32))


def _above(keys: Array, threshold: Array, room: Array) -> Array:
    """Keys over the threshold, and of those equal to it the first ``room``."""
    equal = keys == threshold
    return (keys > threshold) | (equal & (jnp.cumsum(equal, -1) <= room))
