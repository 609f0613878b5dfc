"""The Triton kernels in Triton's interpreter, against the reference. Run by ``test_triton.py`` in a process of its own,
since TRITON_INTERPRET is read when triton is imported and holds for the whole process."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference, sampling, triton_decode, triton_prefill, triton_sampling
from pallas_kernels.shapes import DECODE, PREFILL
from tests.kernels.interpreter import Argument
from tests.kernels.test_attention import Inputs, make_inputs

assert os.environ.get("TRITON_INTERPRET") == "1", "run me through test_triton.py"

POISON = float("nan")


def decode(inputs: Inputs, split_size: int | None = None, scales: tuple[np.ndarray, np.ndarray] | None = None):
    q, table_width = inputs.q, inputs.block_tables.shape[1]
    shape = inputs.shape
    plan = triton_decode.plan_decode(
        q.shape, inputs.k_cache.shape, table_width, scale=shape.head_dim**-0.5, window=shape.window,
        split_size=split_size, scaled=scales is not None, wide=True,
    )  # fmt: skip
    rows = (q.shape[0], plan.grid[1], plan.splits, q.shape[1] // plan.grid[1])
    partial = Argument(np.full((*rows, q.shape[2]), POISON, np.float32))
    lse = Argument(np.full(rows, POISON, np.float32))
    lens = Argument(np.array(shape.seq_lens, np.int32))
    k_scale, v_scale = scales or (np.ones(1, np.float32),) * 2
    operands = [q, inputs.k_cache, inputs.v_cache, inputs.block_tables]
    triton_decode.decode_kernel[plan.grid](
        *map(Argument, operands), lens, Argument(k_scale), Argument(v_scale), partial, lse, **plan.decode
    )
    if plan.splits == 1:
        return partial.array.reshape(q.shape)
    out = Argument(np.full(q.shape, POISON, np.float32))
    triton_decode.combine_kernel[plan.combine_grid](partial, lse, lens, out, **plan.combine)
    return out.array


def expected_decode(inputs: Inputs, **options) -> np.ndarray:
    shape = inputs.shape
    operands = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, np.array(shape.seq_lens, np.int32))
    run = jax.jit(reference.decode_attention, static_argnames=("scale", "window"))
    return np.asarray(run(*operands, scale=shape.head_dim**-0.5, window=shape.window, **options))


CASES = [*((name, None) for name in DECODE), *((name, 64) for name in ("gqa", "window-over-chunks", "padding"))]


@pytest.mark.parametrize(("name", "split_size"), CASES)
def test_decode(name: str, split_size: int | None):
    inputs = make_inputs(DECODE[name])
    np.testing.assert_allclose(decode(inputs, split_size), expected_decode(inputs), atol=1e-5)


def test_decode_with_scales():
    inputs = make_inputs(DECODE["gqa"])
    k_scale, v_scale = np.array([0.5, 3.0], np.float32), np.array([2.0, 0.25], np.float32)
    got = decode(inputs, scales=(k_scale, v_scale))
    np.testing.assert_allclose(got, expected_decode(inputs, k_scale=k_scale, v_scale=v_scale), atol=1e-5)


def test_with_a_fixed_split_size_a_row_is_the_same_bits_in_any_batch():
    """What a batch-invariant mode needs: the order of summation depends on the row's own length alone."""
    inputs = make_inputs(DECODE["gqa"])
    together = decode(inputs, split_size=64)
    for row in (0, 5, len(together) - 1):
        shape = DECODE["gqa"]
        alone = Inputs(
            type(shape)((shape.seq_lens[row],), (1,), shape.num_heads, shape.num_kv_heads, shape.head_dim),
            inputs.q[row : row + 1], [], [], inputs.k_cache, inputs.v_cache, inputs.block_tables[row : row + 1],
        )  # fmt: skip
        np.testing.assert_array_equal(decode(alone, split_size=64)[0], together[row])


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name: str):
    inputs = make_inputs(PREFILL[name])
    shape = inputs.shape
    scale = shape.head_dim**-0.5
    grid, parameters, _ = triton_prefill.plan_prefill(
        inputs.q.shape, inputs.k_cache.shape, inputs.block_tables.shape, scale=scale, window=shape.window, wide=True
    )
    lens, starts = np.array(shape.seq_lens, np.int32), np.array(shape.query_start_loc, np.int32)
    operands = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, lens, starts)
    out = Argument(np.full(inputs.q.shape, POISON, np.float32))
    triton_prefill.prefill_kernel[grid](*map(Argument, operands), out, **parameters)
    run = jax.jit(reference.prefill_attention, static_argnames=("scale", "window"))
    np.testing.assert_allclose(out.array, run(*operands, scale=scale, window=shape.window), atol=1e-5)


def test_sampling_chooses_the_references_tokens():
    """Every combination of cuts, on logits with many ties (rounded to bfloat16) and with few."""
    rng = np.random.default_rng(0)
    rows, vocab = 40, 1501
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[::2] = np.asarray(jnp.asarray(logits[::2], jnp.bfloat16).astype(jnp.float32))
    temperature = rng.choice([0.0, 0.7, 1.0, 1.5], rows).astype(np.float32)
    top_p = rng.choice([0.0, 0.3, 0.9, 1.0], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.05], rows).astype(np.float32)
    top_k = rng.choice([0, -1, 1, 5, 50, 1600], rows).astype(np.int32)
    seeds = rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32)
    choices = rng.integers(0, 5, rows).astype(np.int32)
    positions = rng.integers(0, 9000, rows).astype(np.int32)
    out = Argument(np.full(rows, -7, np.int32))
    operands = (logits, temperature, top_p, min_p, top_k, seeds, choices, positions)
    triton_sampling.sample_kernel[(rows,)](*map(Argument, operands), out, VOCAB=vocab, TILE=512)
    expected = jax.jit(sampling.sample)(
        logits, sampling.SamplingRows(temperature, top_p, min_p, top_k, seeds, choices), positions
    )
    np.testing.assert_array_equal(out.array, expected)
