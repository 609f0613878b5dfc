"""Attention over the paged cache against dense float64 NumPy, for every shape and implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import reference
from pallas_kernels.shapes import DECODE, PREFILL, AttentionShape


@partial(jax.jit, static_argnames=("scale", "window", "backend"))
def decode(q, k_cache, v_cache, block_tables, seq_lens, *, scale, window, backend, **scales):
    """What a second layer gets: the first must leave the plan as it was."""
    _, block_size, kv_heads, _ = k_cache.shape
    sizes = {"kv_heads": kv_heads, "max_seq_len": block_tables.shape[1] * block_size}
    plan = pallas_kernels.plan_decode(seq_lens, **sizes, window=window, backend=backend)
    operands = (q, k_cache, v_cache, block_tables, seq_lens)
    _, plan = pallas_kernels.decode_attention(*operands, plan, scale=scale, backend=backend, **scales)
    out, _ = pallas_kernels.decode_attention(*operands, plan, scale=scale, backend=backend, **scales)
    return out


prefill = jax.jit(pallas_kernels.prefill_attention, static_argnames=("scale", "window", "backend"))

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass
class Inputs:
    """Operands of a call, and beside them each sequence's own keys and values for the oracle."""

    shape: AttentionShape
    q: np.ndarray  # [T, H, D]
    keys: list[np.ndarray]  # of each sequence [L, K, D]
    values: list[np.ndarray]
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray

    def run(self, backend: str) -> np.ndarray:
        shape = self.shape
        options = {"scale": shape.head_dim**-0.5, "window": shape.window, "backend": backend}
        operands = (self.q, self.k_cache, self.v_cache, self.block_tables, np.array(shape.seq_lens, np.int32))
        if shape in DECODE.values():
            return np.asarray(decode(*operands, **options))
        return np.asarray(prefill(*operands, np.array(shape.query_start_loc, np.int32), **options))


def make_inputs(shape: AttentionShape, dtype: str = "float32") -> Inputs:
    """Random operands. Blocks are dealt in random order, and what is no sequence's token is NaN: blocks of nobody,
    block 0 among them, and what a former owner may have left behind a sequence's end in its last block."""
    rng = np.random.default_rng(0)
    row = (shape.num_kv_heads, shape.head_dim)

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, dtype=np.float32).astype(jnp.dtype(dtype))

    keys = [normal(length, *row) for length in shape.seq_lens]
    values = [normal(length, *row) for length in shape.seq_lens]
    owned = sum(shape.num_blocks)
    ids = iter(rng.permutation(np.arange(1, 1 + owned + 5)))
    caches = [np.full((1 + owned + 5, shape.block_size, *row), np.nan, keys[0].dtype) for _ in range(2)]
    tables = np.zeros((len(shape.seq_lens), max(shape.num_blocks) + 3), np.int32)
    for seq, blocks in enumerate(shape.num_blocks):
        tables[seq, :blocks] = [next(ids) for _ in range(blocks)]
        at = np.arange(shape.seq_lens[seq])
        for cache, tokens in zip(caches, (keys[seq], values[seq]), strict=True):
            cache[tables[seq, at // shape.block_size], at % shape.block_size] = tokens
    return Inputs(shape, normal(shape.num_tokens, shape.num_heads, shape.head_dim), keys, values, *caches, tables)


def dense(inputs: Inputs) -> np.ndarray:
    """What attention is, written down plainly; rows of padding are zeros."""
    shape = inputs.shape
    groups = shape.num_heads // shape.num_kv_heads
    out = np.zeros(inputs.q.shape, np.float64)
    starts = shape.query_start_loc
    for seq, (keys, values) in enumerate(zip(inputs.keys, inputs.values, strict=True)):
        keys, values = (np.repeat(a.astype(np.float64), groups, axis=1) for a in (keys, values))
        for token in range(starts[seq], starts[seq + 1]):
            end = shape.seq_lens[seq] - (starts[seq + 1] - 1 - token)
            if end < 1:
                continue
            begin = 0 if shape.window is None else max(0, end - shape.window)
            scores = np.einsum("hd,lhd->hl", inputs.q[token].astype(np.float64), keys[begin:end])
            scores *= shape.head_dim**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[token] = np.einsum("hl,lhd->hd", weights / weights.sum(-1, keepdims=True), values[begin:end])
    return out


CASES = [
    pytest.param(
        shape,
        backend,
        marks=() if backend == "reference" else pytest.mark.gpu,
        id=f"{operation.removesuffix('_attention')}-{name}-{backend}",
    )
    for operation, shapes in (("decode_attention", DECODE), ("prefill_attention", PREFILL))
    for name, shape in shapes.items()
    for backend in ("reference", "triton")
]


@pytest.mark.parametrize(("shape", "backend"), CASES)
def test_equals_dense_attention(shape, backend):
    inputs = make_inputs(shape)
    np.testing.assert_allclose(inputs.run(backend), dense(inputs), atol=TOLERANCE["float32"])


@pytest.mark.parametrize("shape", [DECODE["gqa"], DECODE["window"], PREFILL["chunks"], PREFILL["window"]])
def test_bfloat16(shape):
    inputs = make_inputs(shape, "bfloat16")
    out = inputs.run("reference")
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float64), dense(inputs), atol=TOLERANCE["bfloat16"])


def test_scores_far_from_zero():
    """Thousands, where exp overflows unless the largest score is taken off first."""
    inputs = make_inputs(DECODE["gqa"])
    inputs = replace(inputs, q=inputs.q * 1000)
    np.testing.assert_allclose(inputs.run("reference"), dense(inputs), atol=1e-2)


@pytest.mark.parametrize("name", ["gqa", "window", "window-over-chunks", "block-8"])
def test_a_decode_row_is_the_same_bits_in_any_company(name):
    """Alone among padding, in another place, beside longer ones, and with a wider block table."""
    inputs = make_inputs(DECODE[name])
    together = inputs.run("reference")
    seq_lens = np.array(inputs.shape.seq_lens, np.int32)
    options = {"scale": inputs.shape.head_dim**-0.5, "window": inputs.shape.window, "backend": "reference"}

    def run(q, tables, lengths):
        return np.asarray(decode(q, inputs.k_cache, inputs.v_cache, tables, lengths, **options))

    for seq in range(len(seq_lens)):
        mine = np.arange(len(seq_lens)) == seq
        alone = run(inputs.q, inputs.block_tables * mine[:, None], seq_lens * mine)
        np.testing.assert_array_equal(alone[seq], together[seq])
    turned = run(inputs.q[::-1], inputs.block_tables[::-1], seq_lens[::-1])
    np.testing.assert_array_equal(turned[::-1], together)
    wide = run(inputs.q, np.pad(inputs.block_tables, ((0, 0), (0, 37))), seq_lens)
    np.testing.assert_array_equal(wide, together)
    # Another batch size is another program, whose sums XLA may order otherwise.
    single = run(inputs.q[-1:], inputs.block_tables[-1:], seq_lens[-1:])
    np.testing.assert_allclose(single, together[-1:], atol=1e-6)


@pytest.mark.parametrize("name", ["ragged", "chunks", "window"])
def test_a_prefill_chunk_is_the_same_bits_in_any_company(name):
    inputs = make_inputs(PREFILL[name])
    together = inputs.run("reference")
    options = {"scale": inputs.shape.head_dim**-0.5, "window": inputs.shape.window, "backend": "reference"}
    starts = inputs.shape.query_start_loc
    for seq, (length, queries) in enumerate(zip(inputs.shape.seq_lens, inputs.shape.query_lens, strict=True)):
        q = np.zeros_like(inputs.q)  # one compilation serves all: the chunk is padded to the batch's tokens
        q[:queries] = inputs.q[starts[seq] : starts[seq + 1]]
        table = np.pad(inputs.block_tables[seq : seq + 1], ((0, 0), (0, 37)))
        bounds = np.array([0, queries], np.int32)
        alone = prefill(q, inputs.k_cache, inputs.v_cache, table, np.array([length], np.int32), bounds, **options)
        np.testing.assert_array_equal(alone[:queries], together[starts[seq] : starts[seq + 1]])
        assert not np.any(alone[queries:])


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
def test_decode_puts_its_rows_among_those_of_others(backend):
    """Into the result of prefill attention, as in a step of both; a row of length 0 is a prompt token's."""
    inputs = make_inputs(AttentionShape((5, 0, 40, 700), (1, 1, 1, 1)))
    options = {"scale": inputs.shape.head_dim**-0.5, "backend": backend}
    others = np.random.default_rng(1).normal(size=(6, *inputs.q.shape[1:])).astype(np.float32)
    lens, caches = np.array(inputs.shape.seq_lens, np.int32), (inputs.k_cache, inputs.v_cache, inputs.block_tables)

    @jax.jit
    def run(q, into):
        _, block_size, kv_heads, _ = inputs.k_cache.shape
        sizes = {"kv_heads": kv_heads, "max_seq_len": inputs.block_tables.shape[1] * block_size, "window": None}
        plan = pallas_kernels.plan_decode(lens, **sizes, backend=backend)
        return pallas_kernels.decode_attention(q, *map(jnp.asarray, caches), lens, plan, into=into, **options)[0]

    got = np.asarray(run(np.concatenate([inputs.q, others[4:]]), others))
    expected = np.where((lens > 0)[:, None, None], dense(inputs), others[:4])
    np.testing.assert_allclose(got, np.concatenate([expected, others[4:]]), atol=TOLERANCE["float32"])


def test_decode_scales_multiply_keys_and_values():
    inputs = make_inputs(DECODE["gqa"])
    k_scale, v_scale = np.array([0.5, 3.0], np.float32), np.array([2.0, 0.25], np.float32)
    options = {"scale": 0.25, "window": None, "backend": "reference"}
    operands = (inputs.block_tables, np.array(inputs.shape.seq_lens, np.int32))
    got = decode(inputs.q, inputs.k_cache, inputs.v_cache, *operands, **options, k_scale=k_scale, v_scale=v_scale)
    scaled = (inputs.k_cache * k_scale[:, None], inputs.v_cache * v_scale[:, None])
    np.testing.assert_allclose(got, decode(inputs.q, *scaled, *operands, **options), atol=TOLERANCE["float32"])


def test_write_kv_writes_those_slots_alone():
    rng = np.random.default_rng(0)
    k_cache, v_cache = rng.standard_normal((2, 5, 8, 2, 4), dtype=np.float32).astype(jnp.bfloat16)
    k, v = rng.standard_normal((2, 6, 2, 4), dtype=np.float32)
    # Four tokens, two of padding (into block 0); the last is out of range and must be dropped, not wrapped.
    slots = np.array([39, 8, 17, 0, 3, 5 * 8], np.int32)
    got = jax.jit(reference.write_kv)(k_cache, v_cache, k, v, slots)
    for cache, tokens, new in zip((k_cache, v_cache), (k, v), got, strict=True):
        expected = cache.copy()
        for slot, token in zip(slots[:-1], tokens, strict=False):
            expected[slot // 8, slot % 8] = token.astype(jnp.bfloat16)
        np.testing.assert_array_equal(new, expected)


def test_an_unknown_implementation_is_an_error():
    """An explicit name never falls back."""
    inputs = make_inputs(DECODE["one"])
    with pytest.raises(ValueError, match="plan_decode has no 'tpu' implementation, only reference"):
        inputs.run("tpu")
