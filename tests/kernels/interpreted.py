"""The Triton kernels of a model in Triton's interpreter, against the reference. Run by ``test_triton.py`` in a process
of its own, since TRITON_INTERPRET is read when triton is imported and holds for the whole process."""

from __future__ import annotations

import itertools
import os

import jax
import numpy as np
import pytest

from pallas_kernels import (
    DecodePlan,
    reference,
    triton_decode,
    triton_decode_plan,
    triton_linear,
    triton_norm,
    triton_prefill,
    triton_rope,
    triton_swiglu,
)
from pallas_kernels.shapes import DECODE, PREFILL, AttentionShape
from tests.kernels.interpreter import Argument
from tests.kernels.test_attention import Inputs, make_inputs

assert os.environ.get("TRITON_INTERPRET") == "1", "run me through test_triton.py"

POISON = float("nan")


def plan_of(seq_lens, *, kv_heads: int, max_seq_len: int, window: int | None, split_size: int | None = None, **options):
    """What the plan kernel writes: items and counters."""
    num_seqs = len(seq_lens)
    programs = options.get("programs", triton_decode.choose_tuning(num_seqs, split_size).programs)
    launch = triton_decode_plan.launch_plan(
        num_seqs, kv_heads=kv_heads, programs=programs, max_seq_len=max_seq_len, window=window, split_size=split_size
    )
    items = Argument(np.full(launch.items_shape, -7, np.int32))
    counters = Argument(np.full(launch.num_counters, -7, np.int32))
    lens = Argument(np.array(seq_lens, np.int32))
    triton_decode_plan.plan_kernel[(1,)](lens, items, counters, **launch.parameters)
    return items, counters


def decode(
    inputs: Inputs, split_size: int | None = None, scales=None, layers: int = 1, keep: bool = False, **plan
) -> np.ndarray:
    """What the last of several layers gives, all with the same operands."""
    q, shape, table_width = inputs.q, inputs.shape, inputs.block_tables.shape[1]
    num_seqs, kv_heads = len(shape.seq_lens), shape.num_kv_heads
    items, counters = plan_of(
        shape.seq_lens, kv_heads=kv_heads, max_seq_len=table_width * shape.block_size, window=shape.window,
        split_size=split_size, **plan,
    )  # fmt: skip
    launch = triton_decode.launch_decode(
        q.shape, inputs.k_cache.shape, table_width, len(items.array) - 1,
        triton_decode.choose_tuning(num_seqs, split_size), scale=shape.head_dim**-0.5, window=shape.window,
        scaled=scales is not None, wide=True, keep=keep,
    )  # fmt: skip
    operands = (q, inputs.k_cache, inputs.v_cache, inputs.block_tables)
    factors = scales or (np.ones(1, np.float32),) * 2
    for _ in range(layers):
        shapes = (q.shape, launch.partial_shape, (*launch.partial_shape[:3], triton_decode.COPIES.value))
        out, *scratch = (Argument(np.full(size, POISON, np.float32)) for size in shapes)
        triton_decode.decode_kernel[launch.grid](
            *map(Argument, operands), items, *map(Argument, factors), counters, out, *scratch, **launch.parameters,
        )  # fmt: skip
        assert not counters.array.any()
    return out.array


def expected_decode(inputs: Inputs, **scales) -> np.ndarray:
    shape = inputs.shape
    operands = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_tables, np.array(shape.seq_lens, np.int32))
    plan = DecodePlan((), shape.window, None)
    run = jax.jit(reference.decode_attention, static_argnames="scale")
    return np.asarray(run(*operands, plan, scale=shape.head_dim**-0.5, **scales)[0])


def test_decode_leaves_rows_of_nobody_as_they_are():
    inputs = make_inputs(AttentionShape((5, 0, 700), (1, 1, 1)))
    expected = expected_decode(inputs).copy()
    expected[1] = POISON
    np.testing.assert_allclose(decode(inputs, keep=True), expected, atol=1e-5)


CASES = [*((name, None) for name in DECODE), *((name, 64) for name in ("gqa", "window-over-chunks", "padding"))]


@pytest.mark.parametrize(("name", "split_size"), CASES)
def test_decode(name: str, split_size: int | None):
    inputs = make_inputs(DECODE[name])
    np.testing.assert_allclose(decode(inputs, split_size), expected_decode(inputs), atol=1e-5)


def test_decode_combines_more_partial_results_than_fit_at_once():
    """About twenty items of 64 keys, beside a short sequence and none; the second layer meets the counters that the
    first left."""
    inputs = make_inputs(AttentionShape((1250, 3, 0), (1, 1, 1), head_dim=64))
    np.testing.assert_allclose(decode(inputs, layers=2, programs=1000), expected_decode(inputs), atol=1e-5)


PLANS = [
    dict(seq_lens=[540], kv_heads=8, programs=132),
    dict(seq_lens=[540] * 8, kv_heads=8, programs=132),
    dict(seq_lens=[0, 1, 63, 64, 65, 0], kv_heads=2, programs=132),
    dict(seq_lens=[100] * 30 + [7000], kv_heads=8, programs=132),
    dict(seq_lens=[*range(1, 300, 7)], kv_heads=1, programs=1),
    dict(seq_lens=[2000, 90, 300], kv_heads=4, programs=528, window=100),
    dict(seq_lens=[2000, 90, 300], kv_heads=4, programs=528, window=1),
    dict(seq_lens=[2000, 128, 129, 0], kv_heads=4, split_size=128),
    dict(seq_lens=[2000, 90, 300, 129], kv_heads=4, split_size=128, window=150),
]


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_covers_every_key_once(case: dict):
    check_plan(**case)


def test_random_plans_cover_every_key_once():
    rng = np.random.default_rng(0)
    for _ in range(40):
        longest = int(rng.choice([1, 70, 500, 3000]))
        check_plan(
            rng.integers(0, longest + 1, rng.integers(1, 40)).tolist(), kv_heads=int(rng.choice([1, 2, 8])),
            programs=int(rng.choice([1, 132, 528])), window=rng.choice([None, 1, 50, 1000]),
            split_size=rng.choice([None, None, 64, 256]),
        )  # fmt: skip


def check_plan(seq_lens: list[int], *, kv_heads: int, window: int | None = None, split_size: int | None = None, **plan):
    items, counters = plan_of(
        seq_lens, kv_heads=kv_heads, max_seq_len=3 * 2048 + 1000, window=window, split_size=split_size, **plan
    )
    assert not counters.array.any()
    number = items.array[0, 0]
    assert len(seq_lens) <= number < len(items.array)
    mine = items.array[1 : 1 + number]
    assert sorted(mine[:, 3]) == list(range(number))  # each has a place of its own among the partial results
    sizes = mine[:, 2] - mine[:, 1]
    ends = sizes[number - len(seq_lens) :]
    assert (np.diff(ends) <= 0).all(), "the ends of sequences, longest first"
    for seq, length in enumerate(seq_lens):
        own = mine[mine[:, 0] == seq]
        own = own[np.argsort(own[:, 3])]
        first, count = own[0, 3], len(own)
        np.testing.assert_array_equal(own[:, 3], np.arange(first, first + count))
        assert (own[:, 4:7] == [first, count, length]).all()
        assert (own[1:, 1] == own[:-1, 2]).all() and own[-1, 2] == length
        unseen = 0 if window is None else max(0, length - window)
        grain = split_size or triton_decode_plan.GRAIN
        assert own[0, 1] == unseen // grain * grain
        if split_size:
            assert (own[:-1, 2] - own[:-1, 1] == split_size).all() and own[-1, 2] - own[-1, 1] <= split_size


def test_a_plan_cuts_few_sequences_and_of_many_the_longest():
    """What the shapes that matter most come to, with 8 KV heads: programs for a GPU of 132 SMs."""

    def sizes(seq_lens: list[int], programs: int) -> list[int]:
        items, _ = plan_of(seq_lens, kv_heads=8, max_seq_len=131072, window=None, programs=programs)
        mine = items.array[1 : 1 + items.array[0, 0]]
        return (mine[:, 2] - mine[:, 1]).tolist()

    assert sizes([540], 132) == [64] * 8 + [28]
    assert sizes([540] * 8, 132) == [272] * 8 + [268] * 8
    assert sizes([540] * 32, 132) == [540] * 32
    assert max(sizes([100] * 63 + [16000], 528)) < 1000


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
