"""The Triton sampler against the reference, both on the GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.sampling import SamplingRows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [520, 49152, 128256])
def test_both_choose_the_same_tokens(vocab: int):
    """Up to rounding: of 512 rows no more than two may differ, where two noisy scores are within a few ulp."""
    rng = np.random.default_rng(vocab)
    rows = 512
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[::2] = np.asarray(jnp.asarray(logits[::2], jnp.bfloat16).astype(jnp.float32))
    logits[1::4] /= 3  # flat: top-p keeps tens of thousands
    logits[3::16, -64:] = -1e9
    logits[:8] = 2.0  # equal ones overflow the lists
    settings = SamplingRows(
        rng.choice([0.0, 0.7, 1.0, 1.5], rows).astype(np.float32),
        rng.choice([0.0, 0.3, 0.9, 0.999, 1.0], rows).astype(np.float32),
        rng.choice([0.0, 0.05], rows).astype(np.float32),
        rng.choice([0, -1, 1, 5, 50, 300, vocab + 1], rows).astype(np.int32),
        rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32),
        rng.integers(0, 5, rows).astype(np.int32),
    )
    positions = rng.integers(0, 9000, rows).astype(np.int32)
    sample = jax.jit(pallas_kernels.sample, static_argnames="backend")
    got, expected = (sample(logits, settings, positions, backend=b) for b in ("triton", "reference"))
    assert (got[0] != expected[0]).sum() <= 2
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)
