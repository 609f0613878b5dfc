"""The Triton sampler against the reference, both on the GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.adjust import Allowed, Edits, Penalties
from pallas_kernels.sampling import SamplingRows
from tests.kernels.test_sampling import critical_value, make_logits, make_rows, sorted_keep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("vocab", [520, 49152, 50257, 128256])
def test_both_choose_the_same_tokens(vocab: int, chained: bool):
    """Up to rounding: of 512 rows no more than two may differ, where two noisy scores are within a few ulp."""
    rng = np.random.default_rng(vocab)
    rows = 512
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[::2] = np.asarray(jnp.asarray(logits[::2], jnp.bfloat16).astype(jnp.float32))
    logits[1::4] /= 3  # flat: top-p keeps tens of thousands
    logits[3::16, -64:] = -1e9
    logits[:8] = 2.0  # all equal: the cut is one by ids, and lists overflow
    settings = SamplingRows(
        rng.choice([0.0, 0.7, 1.0, 1.5], rows).astype(np.float32),
        rng.choice([0.0, 0.3, 0.9, 0.999, 1.0], rows).astype(np.float32),
        rng.choice([0.0, 0.05], rows).astype(np.float32),
        rng.choice([0, -1, 1, 5, 50, 300, vocab + 1], rows).astype(np.int32),
        rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32),
        rng.integers(0, 5, rows).astype(np.int32),
    )
    positions = rng.integers(0, 9000, rows).astype(np.int32)
    sample = jax.jit(pallas_kernels.sample, static_argnames=("backend", "as_chain"))
    got = sample(logits, settings, positions, backend="triton", as_chain=chained)
    expected = sample(logits, settings, positions, backend="reference")
    assert (got[0] != expected[0]).sum() <= 2
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.7}],
    ids=str,
)
def test_frequencies_are_the_softmax_of_what_is_kept(options: dict[str, float]):
    """Of logits with ties, as bfloat16 has them; what is kept is found in float64."""
    count, vocab = 100_000, 16
    logits = np.array(jnp.asarray(make_logits("float32", 1, vocab) / 3, jnp.bfloat16).astype(jnp.float32))
    logits[0, 3:6] = logits[0, 9]
    scaled = logits[0] / options.get("temperature", 1.0)
    kept, _ = sorted_keep(scaled, int(options.get("top_k", 0)), options.get("top_p", 1.0), options.get("min_p", 0.0))
    weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0.0)
    rows = make_rows(count, seeds=7, **options)
    positions = np.arange(count, dtype=np.int32)
    tokens, _ = pallas_kernels.sample(np.repeat(logits, count, 0), rows, positions, backend="triton")
    observed = np.bincount(tokens, minlength=vocab)
    np.testing.assert_array_equal(observed > 0, kept)
    expected = count * weights[kept] / weights.sum()
    assert np.sum((observed[kept] - expected) ** 2 / expected) < critical_value(kept.sum() - 1)


def test_penalties_and_masks():
    rng = np.random.default_rng(0)
    rows, vocab = 9, 128256
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * 4
    logits[4, 7] = np.nan
    seen = rng.choice([0, 0, 1, 2, 300, -(2**15), 3 - 2**15], (rows, vocab)).astype(np.int16)
    words = rng.integers(-(2**31), 2**31, (2, rows, vocab // 32)).astype(np.int32)
    allowed = Allowed(*words, np.arange(rows, dtype=np.int32) % 2)
    penalties = Penalties(*rng.choice([0.0, 0.5, 1.0], (3, rows)).astype(np.float32) + np.float32([[0], [0], [0.5]]))
    slots = rng.permutation(rows).astype(np.int32)
    ids = rng.integers(0, 2 * vocab, (rows, 1024)).astype(np.int32)
    values = np.zeros(ids.shape, np.float32)
    values[slots] = np.where(ids % 2, -np.inf, ids / vocab)
    edits = Edits.of(ids, values, vocab)
    operands = (logits, seen, slots, penalties, allowed, edits, make_rows(rows, temperature=1.0, top_p=0.9))
    adjust = jax.jit(pallas_kernels.adjust_logits, static_argnames="backend")
    got, expected = (adjust(*operands, backend=backend) for backend in ("triton", "reference"))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
    drawn = (got[0], operands[-1], np.arange(rows, dtype=np.int32))
    with_stats, without = (pallas_kernels.sample(*drawn, stats=s, backend="triton") for s in (got[1], ()))
    np.testing.assert_allclose(with_stats[1], *expected[1], rtol=1e-6)
    finite = np.arange(rows) != 4
    np.testing.assert_array_equal(with_stats[0][finite], without[0][finite])
