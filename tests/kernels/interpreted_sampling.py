"""The sampler's Triton kernels in Triton's interpreter, against the reference; see ``interpreted``."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import adjust, sampling, triton_adjust, triton_sampling, triton_sampling_resolve
from tests.kernels.interpreter import Argument

assert os.environ.get("TRITON_INTERPRET") == "1", "run me through test_triton.py"

POISON = float("nan")


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
    assert (arrivals[:, 0] <= arrivals[:, 1]).all()
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
    by_row, by_slot = (rng.integers(-(2**31), 2**31, (n, -(-vocab // 32))).astype(np.int32) for n in (count, 4))
    by_row[0], by_row[5], by_row[5, 0] = -1, 0, 8
    allowed = adjust.Allowed(by_row, by_slot, np.array([0, 1, 0, 1, 0, 0], np.int32))
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
    adjusted, [normalizers] = jax.jit(pallas_kernels.adjust_logits, static_argnames="backend")(
        *operands, backend="reference"
    )
    plan = dataclasses.replace(triton_sampling.plan_sampling(count, vocab), segment=64, tile=256, **sizes)
    out, *stats = triton_adjust.run_adjust(run_kernel, plan, *operands)
    np.testing.assert_allclose(out.array, adjusted, rtol=1e-6)
    assert np.isnan(normalizers).tolist() == [False] * 4 + [True, False]
    tokens, got = triton_sampling.run_kernels(run_kernel, plan, out, rows, positions, stats)
    np.testing.assert_allclose(got.array, normalizers, rtol=1e-6)
    parameters, shapes = plan.stats
    operands = (out, rows.temperature, rows.top_p, rows.top_k)
    of_result = run_kernel(triton_sampling.stats_kernel, (plan.programs,), operands, shapes, **parameters)
    stats[0].array[:, 2:] = of_result[0].array[:, 2:]  # what the model gave is something else
    for got, expected in zip(stats, of_result, strict=True):
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
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_any_logits_have_an_end(value: float, min_p: float):
    """Some or all of a row: an id comes out."""
    count, vocab = 8, 300
    logits = np.zeros((count, vocab), np.float32)
    logits[::2, 5], logits[1::2] = value, value
    rows = random_rows(np.random.default_rng(9), count, temperature=1.0, min_p=min_p)._replace(
        top_p=np.float32([1, 1, 0.5, 0.5, 1, 1, 0.5, 0.5]), top_k=np.int32([0, 0, 0, 0, 3, 3, 200, 200])
    )
    positions, plan = np.zeros(count, np.int32), dict(chunk=256, tile=256, listed=10, stride=1)
    got, _, (_, [bounds], *_) = sample(logits, rows, positions, **plan)
    assert ((got >= 0) & (got < vocab)).all()
    uncut = bounds[(rows.top_p == 1) & (rows.top_k == 0)]
    assert len(uncut) and np.isfinite(uncut[:, [0, 1, 3]]).all(), "nothing is listed where there is no cut"


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


def test_there_is_no_limit_of_rows():
    """A grid's first number may be as large as 2^31 - 1, the others no more than 65,535."""
    grids = []

    def call(kernel, grid, operands, out, **parameters):
        grids.append(grid)
        return out

    rows, nothing = sampling.SamplingRows(*[None] * 6), np.empty((0, 16))
    plan = triton_sampling.plan_sampling(100_000, nothing.shape[1])
    triton_sampling.run_kernels(call, plan, nothing, rows, None)
    allowed, edits = adjust.Allowed(*[nothing] * 3), adjust.Edits(*[nothing] * 4)
    triton_adjust.run_adjust(call, plan, nothing, None, None, (), allowed, edits, rows)
    assert len(grids) == 5
    assert all(max(grid[1:], default=0) <= 65_535 for grid in grids)
