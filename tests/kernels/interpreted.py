"""The Triton kernels in Triton's interpreter, against the reference. Run by ``test_triton.py`` in a process of its own,
since TRITON_INTERPRET is read when triton is imported and holds for the whole process."""

from __future__ import annotations

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    reference,
    sampling,
    triton_decode,
    triton_linear,
    triton_norm,
    triton_prefill,
    triton_rope,
    triton_sampling,
    triton_swiglu,
)
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


@pytest.mark.parametrize(
    ("kv_heads", "groups", "dim", "parts"), [(2, 4, 16, 1), (1, 1, 48, 1), (3, 3, 64, 1), (2, 3, 16, 3)]
)
def test_rope_and_write(kv_heads: int, groups: int, dim: int, parts: int):
    rng = np.random.default_rng(0)
    tokens, block_size = 7, 8
    qkv = rng.standard_normal((tokens, kv_heads, groups + 2, dim), dtype=np.float32)
    angles = rng.standard_normal((tokens, dim // 2), dtype=np.float32)
    k_cache, v_cache = rng.standard_normal((2, 4, block_size, kv_heads, dim), dtype=np.float32)
    slots = rng.permutation(4 * block_size)[:tokens].astype(np.int32)
    turns = np.cos(angles), np.sin(angles)
    expected = jax.jit(reference.rope_and_write, static_argnames="dtype")(
        qkv[None], *turns, k_cache, v_cache, slots, dtype=np.float32
    )
    summands = in_parts(rng, qkv, parts)
    grid, parameters = triton_rope.plan_rope(summands.shape)
    q = Argument(np.full((tokens, kv_heads * groups, dim), POISON, np.float32))
    caches = [Argument(k_cache.copy()), Argument(v_cache.copy())]
    inputs = [Argument(a) for a in (summands, *turns, slots)]
    triton_rope.rope_kernel[grid](*inputs, *caches, q, **parameters)
    for got, want in zip((q, *caches), expected, strict=True):
        np.testing.assert_allclose(got.array, want, atol=1e-6)


@pytest.mark.parametrize(("width", "parts"), [(64, 1), (96, 3), (576, 1)])
def test_add_rms_norm(width: int, parts: int):
    rng = np.random.default_rng(0)
    x, delta = rng.standard_normal((2, 5, width), dtype=np.float32)
    weight = rng.standard_normal(width, dtype=np.float32)
    summands = in_parts(rng, delta, parts)
    grid, parameters = triton_norm.plan_add_rms_norm(summands.shape, 1e-5)
    out = [Argument(np.full(x.shape, POISON, np.float32)) for _ in range(2)]
    triton_norm.add_rms_norm_kernel[grid](*map(Argument, (x, summands, weight)), *out, **parameters)
    for got, want in zip(out, reference.add_rms_norm(x, delta[None], weight, eps=1e-5), strict=True):
        np.testing.assert_allclose(got.array, want, atol=1e-5)


def in_parts(rng: np.random.Generator, total: np.ndarray, parts: int) -> np.ndarray:
    """``parts`` arrays whose sum is ``total``, but for rounding."""
    rest = rng.standard_normal((parts - 1, *total.shape), dtype=np.float32)
    return np.concatenate([rest, (total - rest.sum(0))[None]])


@pytest.mark.parametrize("splits", [1, 3, 4])
def test_linear(splits: int):
    """Rows that do not fill a tile, and stretches of unequal length (128 / 32 in three)."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((21, 128), dtype=np.float32), rng.standard_normal((128, 64), dtype=np.float32)
    out = Argument(np.full((splits, 21, 64), POISON, np.float32))
    triton_linear.linear_kernel[2, splits](Argument(x), Argument(w), 21 - 1, 4, out, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
    ends = [128 // 32 * split // splits * 32 for split in range(splits + 1)]
    for part, (first, last) in zip(out.array, itertools.pairwise(ends), strict=True):
        np.testing.assert_allclose(part, x[:, first:last] @ w[first:last], atol=1e-4)


def test_gated_linear():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((21, 64), dtype=np.float32), rng.standard_normal((64, 2, 64), dtype=np.float32)
    out = Argument(np.full((21, 64), POISON, np.float32))
    triton_linear.gated_linear_kernel[2, 1](
        Argument(x), Argument(w), 21 - 1, 2, out, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32
    )
    np.testing.assert_allclose(out.array, reference.gated_linear(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [64, 1100])
def test_swiglu(width: int):
    gate_up = np.random.default_rng(0).standard_normal((3, 2, width), dtype=np.float32)
    grid, parameters = triton_swiglu.plan_swiglu(gate_up.shape)
    out = Argument(np.full((3, width), POISON, np.float32))
    triton_swiglu.swiglu_kernel[grid](Argument(gate_up), out, **parameters)
    np.testing.assert_allclose(out.array, reference.swiglu(gate_up), atol=1e-6)


@pytest.mark.parametrize(("name", "scaled"), [*((name, False) for name in PREFILL), ("chunks", True)])
def test_prefill(name: str, scaled: bool):
    inputs = make_inputs(PREFILL[name])
    shape = inputs.shape
    scale = shape.head_dim**-0.5
    grid, parameters, _ = triton_prefill.plan_prefill(
        inputs.q.shape, inputs.k_cache.shape, inputs.block_tables.shape,
        scale=scale, window=shape.window, scaled=scaled, wide=True,
    )  # fmt: skip
    lens, starts = np.array(shape.seq_lens, np.int32), np.array(shape.query_start_loc, np.int32)
    operands = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, lens, starts)
    scales = np.array([0.5, 3.0], np.float32), np.array([2.0, 0.25], np.float32)
    out = Argument(np.full(inputs.q.shape, POISON, np.float32))
    triton_prefill.prefill_kernel[grid](
        *map(Argument, (*operands, *scales)), inputs.q.shape[0], len(inputs.block_tables), out, **parameters
    )
    run = jax.jit(reference.prefill_attention, static_argnames=("scale", "window"))
    options = dict(zip(("k_scale", "v_scale"), scales, strict=True)) if scaled else {}
    np.testing.assert_allclose(out.array, run(*operands, scale=scale, window=shape.window, **options), atol=1e-5)


def sample(logits: np.ndarray, rows: sampling.SamplingRows, positions: np.ndarray, **plan) -> tuple[np.ndarray, list]:
    """The tokens, and what each kernel wrote. ``plan``: sizes, so small that a short row is work for all."""
    written = []

    def call(kernel, grid, operands, out, **parameters):
        results = [Argument(np.full(shape, POISON if dtype == jnp.float32 else -7, dtype)) for dtype, shape in out]
        operands = (o if isinstance(o, Argument) else Argument(o) for o in operands)
        kernel[grid](*operands, *results, **parameters)
        written.append([result.array for result in results])
        return results

    chunks = {name: plan.pop(name) for name in ("chunk", "tile")}
    shapes = dataclasses.replace(triton_sampling.plan_sampling(*logits.shape, **chunks), **plan)
    return triton_sampling.run_kernels(call, shapes, logits, rows, positions).array, written


def random_rows(rng: np.random.Generator, count: int, **given) -> sampling.SamplingRows:
    """Every combination of cuts, or ``given`` ones."""
    columns = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5], count, p=[0.1, 0.3, 0.3, 0.3]).astype(np.float32),
        "top_p": rng.choice([0.0, 0.3, 0.9, 0.999, 1.0], count).astype(np.float32),
        "min_p": rng.choice([0.0, 0.05], count).astype(np.float32),
        "top_k": rng.choice([0, -1, 1, 5, 50, 1600], count).astype(np.int32),
        "seeds": rng.integers(-(2**31), 2**31, (count, 2)).astype(np.int32),
        "choices": rng.integers(0, 5, count).astype(np.int32),
    }
    columns.update((name, np.full(count, value, columns[name].dtype)) for name, value in given.items())
    return sampling.SamplingRows(**columns)


def row_of(kind: str, rng: np.random.Generator, vocab: int) -> np.ndarray:
    normal = rng.standard_normal(vocab)
    match kind:
        case "flat":
            normal[:] = 2.0
        case "ties":  # of bfloat16, 8 bits of mantissa
            normal = np.asarray(jnp.asarray(normal * 3, jnp.bfloat16), np.float32)
        case "two values":
            normal = np.where(rng.random(vocab) < 0.3, 1.5, -0.25)
        case "peaked":
            normal[rng.integers(vocab)] = 40.0
        case "wide":
            normal = rng.uniform(-1e4, 1e4, vocab)
        case "masked":
            normal[-100:], normal[rng.random(vocab) < 0.01] = -1e9, -3e4
        case "infinite":  # a mask that leaves fewer than fifty
            normal[rng.random(vocab) > 0.02] = -np.inf
        case "broad":
            normal *= 3
    return normal.astype(np.float32)


KINDS = ("normal", "broad", "ties", "flat", "two values", "peaked", "wide", "masked", "infinite")


@pytest.mark.parametrize(("chunk", "segment"), [(1024, 8), (256, 100)])
def test_sampling_chooses_the_references_tokens(chunk: int, segment: int):
    """Every combination of cuts on every kind of row, in one chunk and in several; where lists are short, many rows go
    the slow way."""
    rng = np.random.default_rng(0)
    count, vocab = 4 * len(KINDS), 601
    logits = np.stack([row_of(KINDS[row % len(KINDS)], rng, vocab) for row in range(count)])
    rows, positions = random_rows(rng, count), rng.integers(0, 9000, count).astype(np.int32)
    got, _ = sample(logits, rows, positions, chunk=chunk, tile=256, segment=segment, capacity=3 * segment)
    expected = np.asarray(jax.jit(sampling.sample)(logits, rows, positions))
    wrong = np.flatnonzero(got != expected)
    assert not len(wrong), [(KINDS[w % len(KINDS)], [column[w] for column in rows], got[w], expected[w]) for w in wrong]


def test_sampling_where_each_kept_token_is_likely():
    """One token too many or too few shows: three values on few tokens, so hot that all weigh about the same."""
    rng = np.random.default_rng(3)
    count, vocab = 60, 12
    logits = rng.integers(0, 3, (count, vocab)).astype(np.float32)
    rows = random_rows(rng, count, temperature=100.0)._replace(
        top_p=rng.choice([0.31, 0.57, 1.0, 1.0], count).astype(np.float32),
        top_k=rng.choice([0, 0, 2, 3, 5], count).astype(np.int32),
        min_p=rng.choice([0.0, 0.0, 0.985, 0.995], count).astype(np.float32),
    )
    positions = np.arange(count, dtype=np.int32)
    got, _ = sample(logits, rows, positions, chunk=256, tile=256, segment=4)
    np.testing.assert_array_equal(got, jax.jit(sampling.sample)(logits, rows, positions))


@pytest.mark.parametrize(("given", "segment"), [(dict(top_k=50), 20), (dict(top_p=0.9), 100)])
def test_sampling_narrows_until_few_tokens_are_in_question(given: dict, segment: int):
    rng = np.random.default_rng(1)
    rows = random_rows(rng, 2, **{"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, **given})
    logits = np.stack([row_of("normal", rng, 3000) for _ in range(2)])
    positions = np.zeros(2, np.int32)
    got, (_, first, second, third, drawn, _) = sample(logits, rows, positions, chunk=1024, tile=512, segment=segment)
    np.testing.assert_array_equal(got, jax.jit(sampling.sample)(logits, rows, positions))
    assert (first[0] != second[0]).any() and (second[0] == third[0]).all()  # the second pass suffices, the third rests
    counts, listed = drawn[2:]
    assert (counts.sum(1) > 0).all() and (counts.sum(1) <= segment).all()
    assert (np.sort(listed[0, 0, : counts[0, 0]]) == listed[0, 0, : counts[0, 0]]).all()


def test_a_rows_sums_are_the_same_bits_in_any_batch():
    rng = np.random.default_rng(2)
    rows, positions = random_rows(rng, 3, temperature=1.0, top_p=0.9, top_k=0), np.arange(3, dtype=np.int32)
    logits = np.stack([row_of("normal", rng, 700) for _ in range(3)])
    plan = dict(chunk=256, tile=256, segment=20)
    together, written = sample(logits, rows, positions, **plan)
    last = sampling.SamplingRows(*(column[2:] for column in rows))
    alone, written_alone = sample(logits[2:], last, positions[2:], **plan)
    assert together[2] == alone[0]
    for a, b in zip(written[3], written_alone[3], strict=True):  # of the last narrowing pass
        np.testing.assert_array_equal(a[2], b[0])
