"""Mosaic GPU's prefill attention against dense float64 NumPy: on a GPU, and in Pallas' interpreter on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_kernel, mosaic_prefill
from pallas_kernels.mosaic_kernel import Tuning
from pallas_kernels.shapes import PREFILL, AttentionShape
from tests.kernels.test_attention import TOLERANCE, dense, make_inputs

SHAPES = {name: replace(shape, head_dim=64 if shape.head_dim < 64 else 128) for name, shape in PREFILL.items()}
SHAPES |= {
    "items": AttentionShape((700, 300, 64), (300, 129, 64), 8, 2, 128, leading_tokens=70, padding_tokens=13),
    "many": AttentionShape(tuple(range(3, 192, 3)), tuple(range(1, 64)), 8, 2, 128, padding_tokens=3),
    "nobody": AttentionShape((9, 0, 0), (9, 0, 0), 8, 2, 128, leading_tokens=300, padding_tokens=700),
    "long": AttentionShape((1500, 9000), (140, 33), 8, 2, 128),
    "window-4096": AttentionShape((9000, 500), (200, 50), 8, 2, 128, window=4096, padding_tokens=24),
}


def error(shape, dtype, **options):
    """The largest difference from dense attention."""
    inputs = make_inputs(shape, dtype)
    at = (np.array(shape.seq_lens, np.int32), np.array(shape.query_start_loc, np.int32))
    operands = map(jnp.asarray, (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, *at))
    options = {"scale": shape.head_dim**-0.5, "window": shape.window, **options}
    out = mosaic_prefill.prefill_attention(*operands, **options)
    assert out.dtype == jnp.dtype(dtype)
    return np.max(np.abs(np.asarray(out, np.float64) - dense(inputs)), initial=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense_attention(name):
    assert error(SHAPES[name], "bfloat16") < TOLERANCE["bfloat16"]


@pytest.mark.gpu
def test_float16():
    assert error(SHAPES["chunks"], "float16") < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape((9, 200), (9, 131), 2, 1, 64, 32, leading_tokens=3, padding_tokens=2),
        AttentionShape((9, 200), (9, 131), 2, 1, 64, 32, 100, leading_tokens=3, padding_tokens=2),
        AttentionShape((9, 0), (9, 0), 2, 1, 64, leading_tokens=140, padding_tokens=400),
        AttentionShape((0, 0), (0, 0), 2, 1, 64, padding_tokens=200),
    ],
    ids=["kinds of items", "window", "mostly nobody", "nobody"],
)
def test_in_the_interpreter(monkeypatch, shape):
    """Items of nobody, whole and cut, with and without keys before them. A barrier that nobody arrives at hangs."""

    # The interpreter has no accumulator with a value.
    def multiply(state, values, issued):
        issued()
        product = jnp.dot(state.weights, values[...], preferred_element_type=jnp.float32)
        return state._replace(accumulator=state.accumulator + product)

    def multiply_and_weigh(state, values, begin, issued, weigh):
        def scores_of(product):
            begin(product)
            return product[...]

        state = multiply(state, values, issued)
        scores = pl.run_scoped(scores_of, plgpu.ACC(state.weights.shape, jnp.float32))
        peak, total, keep, weights = weigh(scores)
        return mosaic_kernel.Softmax(state.accumulator, peak, total, weights.astype(state.weights.dtype)), keep

    monkeypatch.setattr(mosaic_kernel, "multiply", multiply)
    monkeypatch.setattr(mosaic_kernel, "multiply_and_weigh", multiply_and_weigh)
    run = partial(error, shape, "bfloat16", tuning=Tuning(thread_blocks=2))
    assert run(interpret=plgpu.InterpretGPUParams()) < TOLERANCE["bfloat16"]


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="mosaic_gpu does not do head size 16"):
        error(PREFILL["one"], "bfloat16")
    with pytest.raises(ValueError, match="mosaic_gpu does not do float32 over a cache of float32"):
        error(SHAPES["one"], "float32")
