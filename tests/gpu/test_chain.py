"""Decode steps whose kernels are launched as a chain, beside the same kernels launched one after the other by XLA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from bench.shapes import LLAMA_8B
from jaxserve.models import llama
from jaxserve.models.attention import AttentionInputs, AttentionSpec
from jaxserve.models.dummy import random_params

pytestmark = pytest.mark.gpu

LAYERS, BLOCK, WIDTH, RUNS = 4, 16, 32, 30


@pytest.fixture(scope="module")
def spec() -> AttentionSpec:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    return AttentionSpec(mesh, "triton", "gluon", "triton", "triton", 128**-0.5)


@pytest.fixture(scope="module")
def params(spec: AttentionSpec) -> llama.Params:
    return random_params(LLAMA_8B(LAYERS), jnp.dtype(jnp.bfloat16), spec.mesh)


def inputs(rows: int) -> tuple[jax.Array, AttentionInputs]:
    """Sequences of many lengths, and one row that nobody has."""
    random = np.random.default_rng(rows)
    lens = random.integers(1, BLOCK * WIDTH, rows).astype(np.int32)
    lens[rows // 2] *= rows == 1
    tables = random.permutation(np.arange(1, rows * WIDTH + 1)).reshape(rows, WIDTH).astype(np.int32)
    last = np.maximum(lens - 1, 0)
    slots = np.where(lens > 0, tables[np.arange(rows), last // BLOCK] * BLOCK + last % BLOCK, 0).astype(np.int32)
    none = np.zeros((0, WIDTH), np.int32), np.zeros(0, np.int32), np.zeros(1, np.int32)
    ids, row = random.integers(0, 128000, rows).astype(np.int32), np.arange(rows, dtype=np.int32)
    return jax.tree.map(jnp.asarray, (ids, AttentionInputs(last, slots, row, tables, lens, lens, *none)))


def error(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_a_chain_is_as_exact_as_its_kernels_one_by_one(rows: int, params: llama.Params, spec: AttentionSpec):
    """Beside float32, and Triton's attention. Run many times: a kernel that comes too early would show now and then,
    the more since there is NaN where the step's keys and values are to be."""
    ids, at = inputs(rows)
    shape = (rows * WIDTH + 1, BLOCK, 8, 128)
    keys = jax.random.split(jax.random.key(rows), 2 * LAYERS)

    def former(key: jax.Array) -> jax.Array:
        tokens = jax.random.normal(key, shape, jnp.bfloat16).reshape(-1, *shape[2:])
        return tokens.at[at.slot_mapping].set(jnp.nan).reshape(shape)

    cache = tuple(tuple(map(former, pair)) for pair in keys.reshape(LAYERS, 2))

    def run(dtype: jnp.dtype, **how: Any) -> Callable[[], Any]:
        forward = jax.jit(partial(llama.forward, config=LLAMA_8B(LAYERS), spec=replace(spec, **how)), donate_argnums=1)
        weights = jax.tree.map(lambda array: array.astype(dtype), params)
        return lambda: forward(weights, jax.tree.map(lambda array: jnp.array(array, dtype), cache), ids, at)

    def worst(got: Any) -> float:
        return max(map(error, jax.tree.leaves(got), exact))

    with jax.default_matmul_precision("highest"):
        reference = dict.fromkeys(("backend", "decode_backend", "prefill_backend", "linear_backend"), "reference")
        exact = jax.tree.leaves(run(jnp.float32, **reference)())
    step = run(jnp.bfloat16, chained=True)
    first = step()
    assert worst(first) < 1.5 * worst(run(jnp.bfloat16, decode_backend="triton")())
    for _ in range(RUNS):
        assert all(map(jnp.array_equal, jax.tree.leaves(step()), jax.tree.leaves(first)))
