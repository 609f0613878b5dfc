"""Decode attention in Gluon on the GPU against dense float64 NumPy: by itself, and in a chain of two layers."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.shapes import DECODE, AttentionShape
from tests.kernels.test_attention import TOLERANCE, Inputs, dense, make_inputs

pytestmark = pytest.mark.gpu

SHAPES = {
    **{name: DECODE[name] for name in ("gqa", "mqa", "block-8", "block-128", "window", "window-over-chunks")},
    **{name: DECODE[name] for name in ("padding", "padding-window", "all-padding")},
    "long": AttentionShape((3000, 1, 700, 0, 65), (1,) * 5, num_heads=14),
    "long-many": AttentionShape((3000, 1, 700, 0, 65) * 8, (1,) * 40, num_heads=14),
    "groups-12": AttentionShape((130, 1, 1500), (1,) * 3, num_heads=24),
}


def attend(inputs: Inputs, chained: bool, into: np.ndarray | None = None, split_size: int | None = None) -> np.ndarray:
    """The second of two layers, so that the first must leave the plan as it was."""
    shape = inputs.shape
    lens, scale = jnp.asarray(shape.seq_lens, jnp.int32), shape.head_dim**-0.5

    def layers(*operands):
        *operands, plan, into = operands
        for _ in range(2):
            out, plan = pallas_kernels.decode_attention(*operands, plan, scale=scale, into=into, backend="gluon")
        return out

    @jax.jit
    def run(*operands):
        length = inputs.block_tables.shape[1] * shape.block_size
        sizes = {"kv_heads": shape.num_kv_heads, "max_seq_len": length, "window": shape.window}
        plan = pallas_kernels.plan_decode(lens, **sizes, split_size=split_size, backend="gluon")
        return (pallas_kernels.chained(layers) if chained else layers)(*operands, lens, plan, into)

    operands = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables)
    return np.asarray(run(*map(jnp.asarray, operands))).astype(np.float64)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense_attention(name: str, times: int, chained: bool):
    """``times`` the sequences: with more than 32 of them it works otherwise."""
    shape = SHAPES[name]
    many = replace(shape, seq_lens=shape.seq_lens * times, query_lens=shape.query_lens * times)
    inputs = make_inputs(replace(many, head_dim=64 if name == "mqa" else 128), "bfloat16")
    np.testing.assert_allclose(attend(inputs, chained), dense(inputs), atol=TOLERANCE["bfloat16"])


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("name", "head_dim"), [("long", 64), ("long", 128), ("long-many", 128)])
def test_a_ring_of_tiles_comes_round(name: str, head_dim: int, chained: bool):
    """Eight tiles an item."""
    inputs = make_inputs(replace(SHAPES[name], head_dim=head_dim), "float16")
    np.testing.assert_allclose(attend(inputs, chained, split_size=512), dense(inputs), atol=TOLERANCE["bfloat16"])


def test_rows_are_put_among_those_of_others():
    inputs = make_inputs(AttentionShape((5, 0, 40, 700), (1, 1, 1, 1), head_dim=128), "bfloat16")
    others = np.random.default_rng(1).normal(size=(6, *inputs.q.shape[1:])).astype(inputs.q.dtype)
    inputs.q = np.concatenate([inputs.q, others[4:]])
    got = attend(inputs, False, into=others)
    empty = (np.array(inputs.shape.seq_lens) == 0)[:, None, None]
    expected = np.where(empty, others[:4], dense(replace(inputs, q=inputs.q[:4])))
    np.testing.assert_allclose(got, np.concatenate([expected, others[4:]]), atol=TOLERANCE["bfloat16"])
