"""Matrix products of few rows on the GPU, beside XLA's in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

pytestmark = pytest.mark.gpu

ROWS = (1, 3, 8, 16, 17, 32, 50, 64, 100, 128)


def operands(rows: int, *weight: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(rows), (rows, weight[0]), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), weight, jnp.bfloat16) * weight[0] ** -0.5
    return x, w.astype(jnp.bfloat16)


def check(got: jax.Array, want: jax.Array, tolerance: float) -> None:
    assert got.shape == want.shape
    error = np.linalg.norm(np.float32(got) - np.float32(want)) / np.linalg.norm(np.float32(want))
    assert error < tolerance


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tensordot(x, w, axes=1, preferred_element_type=jnp.float32)


def launched(function: Callable[..., jax.Array], chained: bool) -> Callable[..., jax.Array]:
    """By Triton's kernels, one by one, or as a chain, which has kernels of its own."""
    run = partial(function, backend="triton")
    return jax.jit(pallas_kernels.chained(run) if chained else run)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("depth", "columns"), [(4096, 6144), (4096, 4096), (14336, 4096), (512, 128)])
def test_parts(rows: int, depth: int, columns: int, chained: bool):
    x, w = operands(rows, depth, columns)
    parts = launched(pallas_kernels.linear_parts, chained)(x, w)
    check(parts.astype(jnp.float32).sum(0), product(x, w), 1e-5 if len(parts) > 1 else 5e-3)


@pytest.mark.parametrize("rows", ROWS)
def test_whole(rows: int):
    x, w = operands(rows, 2048, 128256)
    run = jax.jit(pallas_kernels.linear, static_argnames=("dtype", "backend"))
    check(run(x, w, dtype=jnp.float32, backend="triton"), product(x, w), 1e-5)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_gated(rows: int, chained: bool):
    x, w = operands(rows, 4096, 2, 14336)
    want = jax.jit(partial(pallas_kernels.gated_linear, backend="reference"))(x, w)
    check(launched(pallas_kernels.gated_linear, chained)(x, w), want, 5e-3)
