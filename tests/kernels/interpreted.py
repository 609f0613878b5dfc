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

import pallas_kernels
from pallas_kernels import (
    DecodePlan,
    adjust,
    reference,
    sampling,
    triton_adjust,
    triton_decode,
    triton_decode_plan,
    triton_linear,
    triton_norm,
    triton_prefill,
    triton_rope,
    triton_sampling,
    triton_sampling_resolve,
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


def run_kernel(kernel, grid, operands, out, **parameters) -> list[Argument]:
    results = [Argument(np.full(shape, POISON if dtype == jnp.float32 else -7, dtype)) for dtype, shape in out]
    operands = (o if isinstance(o, Argument) else Argument(np.array(o)) for o in operands)
    kernel[grid](*operands, *results, **parameters)
    return results


def sample(logits: np.ndarray, rows: sampling.SamplingRows, positions: np.ndarray, **plan):
    """The tokens, the normalizers, and what each kernel wrote. ``plan``: sizes, so small that a short row is work for
    all."""
    written = []

    def call(*arguments, **parameters):
        results = run_kernel(*arguments, **parameters)
        written.append([result.array for result in results])
        return results

    shapes = dataclasses.replace(triton_sampling.plan_sampling(*logits.shape), **plan)
    tokens, normalizers = triton_sampling.run_kernels(call, shapes, logits, rows, positions)
    return tokens.array, normalizers.array, written


reference_sample = jax.jit(sampling.sample)


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


@pytest.mark.parametrize(("chunk", "segment", "stride"), [(1024, 16, 1), (256, 200, 4)])
def test_sampling_chooses_the_references_tokens(chunk: int, segment: int, stride: int):
    """Every combination of cuts on every kind of row, in one chunk and in several; where lists are short, or the sample
    is small, many rows go the slow way."""
    rng = np.random.default_rng(0)
    count, vocab = 3 * len(KINDS), 601
    logits = np.stack([row_of(KINDS[row % len(KINDS)], rng, vocab) for row in range(count)])
    rows, positions = random_rows(rng, count), rng.integers(0, 9000, count).astype(np.int32)
    sizes = dict(chunk=chunk, segment=segment, stride=stride, listed=30, capacity=3 * segment, tile=256)
    got, normalizers, _ = sample(logits, rows, positions, **sizes)
    expected, expected_normalizers = map(np.asarray, reference_sample(logits, rows, positions))
    wrong = np.flatnonzero(got != expected)
    assert not len(wrong), [(KINDS[w % len(KINDS)], [column[w] for column in rows], got[w], expected[w]) for w in wrong]
    np.testing.assert_allclose(normalizers, expected_normalizers, rtol=1e-6)
    assert np.isnan(normalizers).sum() == 3  # the rows that are partly infinite


def test_sampling_where_each_kept_token_is_likely():
    """One token too many or too few shows: three values on few tokens, so hot that all weigh about the same."""
    rng = np.random.default_rng(3)
    count, vocab = 30, 12
    logits = rng.integers(0, 3, (count, vocab)).astype(np.float32)
    rows = random_rows(rng, count, temperature=100.0)._replace(
        top_p=rng.choice([0.31, 0.57, 1.0, 1.0], count).astype(np.float32),
        top_k=rng.choice([0, 0, 2, 3, 5], count).astype(np.int32),
        min_p=rng.choice([0.0, 0.0, 0.985, 0.995], count).astype(np.float32),
    )
    positions = np.arange(count, dtype=np.int32)
    got, *_ = sample(logits, rows, positions, chunk=256, tile=256, segment=4)
    np.testing.assert_array_equal(got, reference_sample(logits, rows, positions)[0])


def test_sampling_where_the_first_to_arrive_does_not_win():
    """Noise that is far from its series decides between few tokens that differ."""
    count = 16
    logits = np.tile(np.float32([0.0, -1.0, -1.5, -2.0]), (count, 1))
    rows = random_rows(np.random.default_rng(6), count, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    positions = np.arange(count, dtype=np.int32)
    got, _, (*_, [_, arrivals, first, *_], _) = sample(logits, rows, positions, chunk=256, tile=256, segment=4)
    np.testing.assert_array_equal(got, reference_sample(logits, rows, positions)[0])
    assert (arrivals[:, 0] < arrivals[:, 1]).all()
    assert (first[:, 0] != got).any()


def exact_cut(row: np.ndarray, given: dict[str, float]) -> float:
    """The logit of the last token kept, in float64; the temperature is 1."""
    ordered = np.sort(row.astype(np.float64))[::-1]
    if "top_k" in given:
        return float(ordered[int(given["top_k"]) - 1])
    weights = np.exp(ordered - ordered[0])
    return float(ordered[np.searchsorted(np.cumsum(weights), given["top_p"] * weights.sum())])


@pytest.mark.parametrize("given", [dict(top_k=50), dict(top_k=3000), dict(top_p=0.3), dict(top_p=0.95)])
@pytest.mark.parametrize("kind", ["normal", "broad", "ties", "peaked"])
def test_the_sample_tells_where_the_cut_is(kind: str, given: dict[str, float]):
    """Between the bounds, and few tokens with it. Where there is no upper one, all above are listed."""
    rng = np.random.default_rng(1)
    count = 2
    rows = random_rows(rng, count, **{"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, **given})
    logits = np.stack([row_of(kind, rng, 20000) for _ in range(count)])
    positions = np.zeros(count, np.int32)
    got, _, (_, [bounds], drawn, _) = sample(logits, rows, positions, segment=4096, listed=700, stride=4)
    np.testing.assert_array_equal(got, reference_sample(logits, rows, positions)[0])
    for row, (low, high, *_), counts in zip(logits, bounds, drawn[3], strict=True):
        assert low <= exact_cut(row, given) < high
        within = np.count_nonzero((row >= low) & (row < high))
        assert 0 < within < 4000
        assert high < np.inf or counts.sum() == within


def test_a_rows_sums_are_the_same_bits_in_any_batch():
    rng = np.random.default_rng(2)
    rows, positions = random_rows(rng, 3, temperature=1.0, top_p=0.9, top_k=0), np.arange(3, dtype=np.int32)
    logits = np.stack([row_of("normal", rng, 700) for _ in range(3)])
    plan = dict(chunk=256, tile=256, listed=0)
    together, _, written = sample(logits, rows, positions, **plan)
    last = sampling.SamplingRows(*(column[2:] for column in rows))
    alone, _, written_alone = sample(logits[2:], last, positions[2:], **plan)
    assert together[2] == alone[0]
    for kernel in (0, 1, 2):
        for a, b in zip(written[kernel][:3], written_alone[kernel][:3], strict=True):
            np.testing.assert_array_equal(a[2], b[0])


@pytest.mark.parametrize(("vocab", "sizes"), [(70, dict(chunk=128, stride=1)), (1500, dict(chunk=256, stride=4))])
def test_adjusted_logits_and_what_is_sampled_of_them(vocab: int, sizes: dict[str, int]):
    rng = np.random.default_rng(0)
    count, slots = 6, np.array([3, 0, 2, 1, 3, 2], np.int32)
    logits = rng.standard_normal((count, vocab), dtype=np.float32) * 4
    logits[4, 7] = -np.inf
    seen = rng.choice([0, 0, 1, 2, 30, -(2**15), 3 - 2**15], (4, vocab)).astype(np.int16)
    allowed = rng.integers(-(2**31), 2**31, (count, -(-vocab // 32))).astype(np.int32)
    allowed[0], allowed[5], allowed[5, 0] = -1, 0, 8
    columns = [[0.5, 0, 0, -2.0, 0, 0], [0.25, 0, 0, 0, 1.0, 0], [1.5, 1.0, 0.8, 1.0, 1.0, 1.0]]
    penalties = adjust.Penalties(*np.array(columns, np.float32))
    # Some in a second block, where others have none; one token with a bias is barred as well; one row has none.
    ids = np.full((count, 2 * adjust.EDITS_AT_ONCE), vocab, np.int32)
    ids[:, 5:25] = rng.permuted(np.tile(np.arange(vocab), (count, 1)), axis=1)[:, :20]
    ids[:2, 280], ids[1] = ids[:2, 6], vocab
    values = rng.standard_normal((4, ids.shape[1]), dtype=np.float32)
    values[:, 6] = -np.inf
    edits = adjust.Edits.of(ids, values, vocab)
    rows = random_rows(rng, count)
    positions = np.arange(count, dtype=np.int32)
    operands = (logits, seen, slots, penalties, allowed, edits, rows)
    adjusted, normalizers, _ = jax.jit(pallas_kernels.adjust_logits, static_argnames="backend")(
        *operands, backend="reference"
    )
    plan = dataclasses.replace(triton_sampling.plan_sampling(count, vocab), segment=64, tile=256, **sizes)
    operands = (seen, slots, *penalties, allowed)
    out, sums, *stats = triton_adjust.run_adjust(run_kernel, plan, logits, operands, edits, rows)
    np.testing.assert_allclose(out.array, adjusted, rtol=1e-6)
    np.testing.assert_allclose(triton_adjust.normalizers_of(sums.array), normalizers, rtol=1e-6)
    assert np.isnan(normalizers).tolist() == [False] * 4 + [True, False]
    tokens, _ = triton_sampling.run_kernels(run_kernel, plan, out, rows, positions, stats)
    parameters, shapes = plan.stats
    operands = (out, rows.temperature, rows.top_p, rows.top_k)
    sums, *others = run_kernel(triton_sampling.stats_kernel, (count, plan.chunks), operands, shapes, **parameters)
    sums.array[:, 1] = POISON  # nobody asked
    for got, expected in zip(stats, (sums, *others), strict=True):
        np.testing.assert_array_equal(got.array, expected.array)
    np.testing.assert_array_equal(tokens.array, reference_sample(out.array, rows, positions)[0])


def watched(monkeypatch: pytest.MonkeyPatch, name: str) -> list:
    """What a function of ``resolve_kernel`` gives, call by call."""
    run, results = getattr(triton_sampling_resolve, name), []

    def watch(*operands):
        results.append(run(*operands))
        return results[-1]

    monkeypatch.setattr(triton_sampling_resolve, name, watch)
    return results


def bounded_rows(rng: np.random.Generator, count: int, **given):
    """Logits and parameters of rows of which top-p or top-k keeps many, so that the sample bounds the cut."""
    rows = random_rows(rng, count, **{"temperature": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": 0, **given})
    return rng.standard_normal((count, 1500), dtype=np.float32), rows, np.arange(count, dtype=np.int32)


BOUNDED = dict(chunk=256, tile=256, wide=512, listed=100, stride=4)


@pytest.mark.parametrize(
    ("given", "unit"),
    [(dict(top_p=0.6), 2.0**-20), (dict(top_p=0.6), 0.25), (dict(top_p=0.6), 100.0), (dict(top_k=700), 2.0**-20)],
)
def test_winners_between_the_bounds_are_kept_or_not(
    monkeypatch: pytest.MonkeyPatch, unit: float, given: dict[str, float]
):
    """By those ahead of them: nobody looks for the exact cut. Each of the ways to a winner is gone by some row. Few
    logits are equal, or many, or all of them."""
    rng = np.random.default_rng(7)
    count = 24
    logits, rows, positions = bounded_rows(rng, count, **given)
    logits = np.round(logits / unit) * unit + 0.0
    exactly, dropped = watched(monkeypatch, "_keys_kept"), watched(monkeypatch, "_is_dropped")
    got, _, (_, [bounds], *_) = sample(logits, rows, positions, **BOUNDED)
    np.testing.assert_array_equal(got, reference_sample(logits, rows, positions)[0])
    low, sure = bounds[:, 0], bounds[:, 1]
    assert np.isfinite(sure).all()
    assert not exactly
    won = logits[np.arange(count), got]
    assert (won >= low).all()
    assert (won < sure).sum() >= 2
    assert {bool(result.handle.data.item()) for result in dropped} == {True, False}
    assert (won >= sure).sum() >= 3 or unit == 100.0


def test_winners_where_the_sample_is_wrong(monkeypatch: pytest.MonkeyPatch):
    """Tokens of the sample that are all among the best, or below the cut: sums over the row tell, and all of it is
    searched."""
    rng = np.random.default_rng(8)
    count = 8
    logits, rows, positions = bounded_rows(rng, count, top_p=0.6)
    index = np.arange(logits.shape[1] // BOUNDED["stride"])
    sampled = index * BOUNDED["stride"] + index * 11 % BOUNDED["stride"]
    others = np.setdiff1d(np.arange(logits.shape[1]), sampled)
    for row in range(count):
        ordered = np.roll(np.sort(logits[row]), 0 if row < 4 else 675)  # the last of them are the sample's
        logits[row, sampled], logits[row, others] = ordered[-len(index) :], rng.permutation(ordered[: -len(index)])
    exactly, dropped = watched(monkeypatch, "_keys_kept"), watched(monkeypatch, "_is_dropped")
    got, _, (_, [bounds], *_) = sample(logits, rows, positions, **BOUNDED)
    np.testing.assert_array_equal(got, reference_sample(logits, rows, positions)[0])
    cuts = np.array([exact_cut(row, dict(top_p=0.6)) for row in logits])
    assert np.isfinite(bounds).all()
    assert (cuts[:4] < bounds[:4, 0]).all()
    assert (cuts[4:] >= bounds[4:, 1]).all()
    assert len(exactly) == count
    assert not dropped


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_any_logits_have_an_end(value: float):
    """Some or all of a row: an id comes out."""
    count, vocab = 8, 300
    logits = np.zeros((count, vocab), np.float32)
    logits[::2, 5], logits[1::2] = value, value
    rows = random_rows(np.random.default_rng(9), count, temperature=1.0, min_p=0.0)._replace(
        top_p=np.float32([1, 1, 0.5, 0.5, 1, 1, 0.5, 0.5]), top_k=np.int32([0, 0, 0, 0, 3, 3, 200, 200])
    )
    got, *_ = sample(logits, rows, np.zeros(count, np.int32), chunk=256, tile=256, listed=10, stride=1)
    assert ((got >= 0) & (got < vocab)).all()


def test_the_exact_cut_is_looked_for_where_it_matters(monkeypatch: pytest.MonkeyPatch):
    """By top-k of few always, since no token is kept for sure; by top-p of many never: one of those that are not sure
    is compared with all where it would win."""
    rng = np.random.default_rng(5)
    count = 8
    rows = random_rows(rng, count, temperature=1.0, min_p=0.0)._replace(
        top_p=np.float32([0.9] * 6 + [1.0] * 2), top_k=np.int32([0] * 6 + [50] * 2)
    )
    exactly, dropped = watched(monkeypatch, "_keys_kept"), watched(monkeypatch, "_is_dropped")
    logits, positions = rng.standard_normal((count, 20000), dtype=np.float32), np.arange(count, dtype=np.int32)
    got, *_ = sample(logits, rows, positions, listed=700)
    np.testing.assert_array_equal(got, reference_sample(logits, rows, positions)[0])
    assert len(exactly) == 2
    assert len(dropped) == 1
