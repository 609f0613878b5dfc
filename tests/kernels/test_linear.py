"""Which matrix products of few rows have a kernel, and how they are cut; the kernels run in ``test_triton.py``."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from pallas_kernels.triton_linear import MAX_SPLITS, SHARED_BYTES, TILES, plan_linear, suits_linear

PRODUCTS = {"qkv": (4096, 6144), "o": (4096, 4096), "down": (14336, 4096)}
"""Of Llama-3.1-8B."""


@pytest.mark.parametrize(
    ("rows", "splits"),
    [(1, (5, 4, 4)), (16, (5, 4, 4)), (17, (2, 4, 4)), (64, (1, 2, 2)), (128, (1, 2, 2))],
)
def test_splits_as_measured(rows: int, splits: tuple[int, ...]):
    plans = [plan_linear("parts", rows, *shape) for shape in PRODUCTS.values()]
    assert tuple(plan.splits for plan in plans if plan) == splits


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize(("depth", "columns"), [*PRODUCTS.values(), (128, 128), (2048, 128256), (1024, 1152)])
def test_every_plan_covers_the_product_and_fits_the_device(kind: str, rows: int, depth: int, columns: int):
    plan = plan_linear(kind, rows, depth, columns)
    assert plan is not None
    m, n, k = (plan.parameters[f"BLOCK_{axis}"] for axis in "MNK")
    assert rows <= m
    assert plan.grid[0] * n == columns
    assert plan.blocks * k == depth
    assert 1 <= plan.splits <= min(MAX_SPLITS, plan.blocks)
    stages = plan.options["num_stages"]
    assert stages >= 3
    assert stages * 2 * k * (n * (2 if kind == "gated" else 1) + m) < SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype"),
    [
        (129, 4096, 4096, "bfloat16"),
        (8, 4096, 4000, "bfloat16"),
        (8, 4000, 4096, "bfloat16"),
        (8, 4096, 4096, "float32"),
    ],
)
def test_the_rest_is_xlas(rows: int, depth: int, columns: int, dtype: str):
    assert suits_linear("parts", 8, 4096, 4096, jnp.dtype("bfloat16"))
    assert not suits_linear("parts", rows, depth, columns, jnp.dtype(dtype))
