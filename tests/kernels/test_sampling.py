"""Which tokens may be chosen, and how often each is: against plain float64 references."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sampling
from pallas_kernels.sampling import SamplingRows

VOCAB = 1000


@jax.jit
def sample(logits, rows, positions):
    return sampling.sample(logits, rows, positions)[0]


@jax.jit
def keep_mask(logits, rows):
    """At temperature 1."""
    return sampling.keep_mask(logits, logits - logits.max(-1, keepdims=True), rows)


def make_rows(count, *, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seeds=None, choices=0) -> SamplingRows:
    """``count`` rows; each argument is one value for all or a value a row."""

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (count,))

    seeds = column(np.arange(count) if seeds is None else seeds, np.int64)
    return SamplingRows(
        column(temperature, np.float32),
        column(top_p, np.float32),
        column(min_p, np.float32),
        column(top_k, np.int32),
        np.ascontiguousarray(seeds).view(np.int32).reshape(count, 2),
        column(choices, np.int32),
    )


def make_logits(kind: str, count: int, vocab: int = VOCAB) -> np.ndarray:
    logits = np.random.default_rng(1).standard_normal((count, vocab), dtype=np.float32) * 3
    if kind == "bfloat16":  # 8 bits of mantissa: every value stands many times
        logits = logits.astype(jnp.bfloat16).astype(np.float32)
    if kind == "flat":
        logits[:] = 2.0
    return logits


# ---------------------------------------------------------------------------- the kept set


def sorted_keep(logits, top_k, top_p, min_p) -> tuple[np.ndarray, np.ndarray]:
    """One row by sorting, in float64: which tokens are kept, and those within 1e-6 of a threshold."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind="stable")  # ties: the lowest id first
    rank = np.argsort(order)
    kept = (weights >= min_p) & (rank < (top_k if top_k > 0 else len(logits)))
    sorted_weights = np.where(kept, weights, 0.0)[order]
    total = sorted_weights.sum()
    before = (np.cumsum(sorted_weights) - sorted_weights)[rank] / total
    close = (np.abs(weights - min_p) < 1e-6) | (np.abs(before - top_p) < 1e-6)
    if top_p < 1.0:
        kept &= (before < top_p) | (rank == 0)
    return kept, close


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "flat"])
def test_keeps_what_sorting_keeps(kind):
    """All combinations in one batch: rows with and without each option beside each other."""
    options = np.array(
        list(product((-1, 0, 1, 5, 300, VOCAB, 5 * VOCAB), (1.0, 0.0, 0.3, 0.9, 0.999), (0, 0.01, 0.3, 1)))
    )
    top_k, top_p, min_p = options.T
    logits = make_logits(kind, len(options))
    got = np.asarray(keep_mask(logits, make_rows(len(options), top_k=top_k, top_p=top_p, min_p=min_p)))
    assert got.any(-1).all()
    differing = 0
    for row, (k, p, m) in enumerate(options):
        expected, close = sorted_keep(logits[row], int(k), float(np.float32(p)), float(np.float32(m)))
        wrong = (got[row] != expected) & ~close
        assert not wrong.any(), f"top_k={k} top_p={p} min_p={m}: tokens {wrong.nonzero()[0][:5]}"
        differing += np.sum(got[row] != expected)
    assert differing <= len(options), "many tokens are close to a threshold only if the sums are inexact"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "flat"])
@pytest.mark.parametrize("length", [40, VOCAB])
def test_the_likeliest_tokens_are_enough_where_it_is_said(kind, length, monkeypatch):
    """Then what may be chosen of them is all that may be."""
    monkeypatch.setattr(sampling, "LISTED", length)
    options = np.array(list(product((0, 1, 39, 40, 41, 300), (1.0, 0.0, 0.3, 0.9), (0, 0.01, 0.3))))
    top_k, top_p, min_p = options.T
    logits = make_logits(kind, len(options))
    rows = make_rows(len(options), top_k=top_k, top_p=top_p, min_p=min_p)
    ids, kept, complete = map(np.asarray, sampling.listed(logits, logits - logits.max(-1, keepdims=True), rows))
    enough = 0
    for row, (k, p, m) in enumerate(options):
        expected, close = sorted_keep(logits[row], int(k), float(np.float32(p)), float(np.float32(m)))
        got = np.isin(np.arange(VOCAB), ids[row][kept[row]])
        if complete[row]:
            np.testing.assert_array_equal(got[~close], expected[~close])
        else:
            assert expected.sum() >= length or length < k < VOCAB
        enough += complete[row]
    assert enough == len(options) if length == VOCAB else 0 < enough < len(options)


@pytest.mark.parametrize("length", [16, 64])
def test_the_same_choice_from_the_likeliest_as_from_all(length, monkeypatch):
    logits = make_logits("bfloat16", 60)
    at = np.arange(60)
    rows = make_rows(60, temperature=0.3 + at / 40, top_p=1 - at % 3 / 4, top_k=10 + at % 4, min_p=at % 2 / 50)
    positions = np.int32(at)
    monkeypatch.setattr(sampling, "LISTED", 1)
    expected, _ = sampling.sample(logits, rows, positions)
    monkeypatch.setattr(sampling, "LISTED", length)
    np.testing.assert_array_equal(sampling.sample(logits, rows, positions)[0], expected)


def test_top_p_over_a_real_vocabulary():
    """128k float32 additions still find the same set."""
    logits = make_logits("float32", 3, vocab=128_256)
    top_p = (0.3, 0.9, 0.95)
    got = np.asarray(keep_mask(logits, make_rows(3, top_p=top_p)))
    for row, p in enumerate(top_p):
        expected, close = sorted_keep(logits[row], 0, float(np.float32(p)), 0.0)
        np.testing.assert_array_equal(got[row][~close], expected[~close])


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_k": 1}, {"top_p": 1e-30}])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "flat"])
def test_keeps_exactly_the_best_token(kind, options):
    """Of several that are equally good, the one with the lowest id, as argmax does."""
    logits = make_logits(kind, 8)
    kept = np.asarray(keep_mask(logits, make_rows(8, **options)))
    np.testing.assert_array_equal(kept.sum(-1), 1)
    np.testing.assert_array_equal(kept.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 2**31 - 1])
def test_top_k_that_keeps_all(top_k):
    logits = make_logits("bfloat16", 4)
    rows = make_rows(4, top_k=[top_k] * 3 + [2])  # the last row alone would let the search be skipped
    kept = np.asarray(keep_mask(logits, rows))
    np.testing.assert_array_equal(kept.sum(-1), [VOCAB] * 3 + [2])


# ---------------------------------------------------------------------------- the choice


def critical_value(freedom: int) -> float:
    """Of chi-square, exceeded once in 10^6 (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4.753 * part**0.5) ** 3


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str
)
def test_frequencies_are_the_softmax_of_what_is_kept(options):
    count, vocab = 20_000, 12
    logits = make_logits("float32", 1, vocab) / 2
    scaled = logits[0] / options.get("temperature", 1.0)
    kept, _ = sorted_keep(scaled, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
    probabilities = np.where(kept, np.exp(scaled.astype(np.float64)), 0.0)
    expected = count * probabilities / probabilities.sum()
    rows = make_rows(count, seeds=7, **options)  # one seed; positions alone tell the draws apart
    tokens = sample(np.repeat(logits, count, 0), rows, np.arange(count, dtype=np.int32))
    observed = np.bincount(tokens, minlength=vocab)
    assert not observed[~kept].any()
    chi_square = np.sum((observed - expected)[kept] ** 2 / expected[kept])
    assert chi_square < critical_value(kept.sum() - 1)


@pytest.mark.parametrize("by", ["seeds", "choices"])
def test_seeds_and_choices_draw_independently(by):
    """A pair of draws that differ in nothing else agrees as often as chance has it."""
    count, vocab = 20_000, 4
    positions = np.arange(count, dtype=np.int32)
    one, other = (
        np.asarray(sample(np.zeros((count, vocab), np.float32), make_rows(count, **{"seeds": 3, by: value}), positions))
        for value in (8, 9)
    )
    assert abs(np.mean(one == other) - 1 / vocab) < 5 * np.sqrt(1 / vocab * (1 - 1 / vocab) / count)


def test_greedy_rows_beside_random_ones():
    logits = make_logits("bfloat16", 40)
    greedy = np.arange(40) % 2 == 0
    rows = make_rows(40, temperature=np.where(greedy, 0.0, 2.0), top_p=0.95, top_k=50)
    tokens = np.asarray(sample(logits, rows, np.arange(40, dtype=np.int32)))
    np.testing.assert_array_equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert np.mean(tokens[~greedy] == logits.argmax(-1)[~greedy]) < 0.5


def test_the_same_choice_in_any_batch():
    """Options, seeds and positions differ between rows; the order of rows and the size of the batch do not matter."""
    logits = make_logits("bfloat16", 24)
    at = np.arange(24)
    rows = make_rows(24, temperature=0.5 + at / 12, top_p=1 - at % 3 / 10, top_k=at % 4 * 20, min_p=at % 2 / 50)
    positions = np.int32(100 + 7 * at)
    together = np.asarray(sample(logits, rows, positions))

    def some(index):
        return np.asarray(sample(logits[index], SamplingRows(*(part[index] for part in rows)), positions[index]))

    np.testing.assert_array_equal(some(at[::-1])[::-1], together)
    np.testing.assert_array_equal(np.concatenate([some(at[i : i + 1]) for i in at]), together)


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-37, 1e-44])
def test_a_tiny_temperature_is_greedy(temperature):
    """Logits over 1e-37 are infinite in float32."""
    logits = make_logits("float32", 8) * 10
    tokens = sample(logits, make_rows(8, temperature=temperature), np.arange(8, dtype=np.int32))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_the_only_token_kept_is_chosen_whatever_the_noise(word, monkeypatch):
    """The greatest words round to 1 in float32: 128 of 2^32, so a server meets them."""
    monkeypatch.setattr(sampling, "token_bits", lambda *of: jnp.full(of[-1].shape, np.uint32(word)))
    logits = make_logits("float32", 8)
    tokens, _ = sampling.sample(logits, make_rows(8, top_k=1), np.arange(8, dtype=np.int32))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
