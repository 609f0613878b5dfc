"""The ladder of padded shapes: every step the scheduler may make has a bucket, and it is the smallest."""

from __future__ import annotations

import pytest

from jaxserve.runner.buckets import MAX_PREFILL_ROWS, Bucket, Ladder, doubling

LADDERS = [
    Ladder((1, 4), (16, 64)),
    Ladder((3,), (8,)),
    Ladder((1, 2, 4, 16), (1, 32, 48)),
    Ladder((2,), (256,)),
]


def holds(bucket: Bucket, decode_rows: int, prefill_tokens: int, prefill_rows: int) -> bool:
    return (
        decode_rows + prefill_tokens <= bucket.tokens
        and decode_rows + prefill_rows <= bucket.rows
        and prefill_rows <= bucket.prefill_rows
    )


def steps(ladder: Ladder):
    """Every step within the scheduler's limits: tokens in the budget, two or more of each prefilling sequence."""
    for decode_rows in range(ladder.max_rows + 1):
        yield decode_rows, 0, 0
        rows_left = min(ladder.max_rows - decode_rows, ladder.max_prefill_rows)
        for prefill_rows in range(1, rows_left + 1):
            for tokens in range(2 * prefill_rows, ladder.token_sizes[-1] - decode_rows + 1):
                yield decode_rows, tokens, prefill_rows


@pytest.mark.parametrize("ladder", LADDERS, ids=str)
def test_every_step_has_the_smallest_bucket_that_holds_it(ladder):
    compiled = ladder.all()
    for step in steps(ladder):
        if step == (0, 0, 0):
            continue
        bucket = ladder.choose(*step)
        assert bucket in compiled
        fitting = [b for b in compiled if holds(b, *step)]
        # A decode step never takes a mixed bucket, nor the other way round: the programs differ.
        fitting = [b for b in fitting if (b.prefill_rows > 0) == (step[1] > 0)]
        assert bucket.tokens == min(b.tokens for b in fitting), step
        assert holds(bucket, *step)


@pytest.mark.parametrize("ladder", LADDERS, ids=str)
def test_buckets_are_listed_once_and_the_largest_is_last(ladder):
    """The largest is compiled first, and on a GPU it is the one whose memory is reserved."""
    buckets = ladder.all()
    assert len(set(buckets)) == len(buckets)
    assert [b.tokens for b in buckets] == sorted(b.tokens for b in buckets)
    assert buckets[-1] == Bucket(ladder.token_sizes[-1], ladder.max_rows, ladder.max_prefill_rows)


@pytest.mark.parametrize(
    ("row_sizes", "rows"),
    [
        ((1, 4), {2: 1, 16: 2, 64: 4}),
        ((1, 2, 4, 8, 16), {2: 1, 16: 2, 64: 8}),
        ((3,), {2: 1, 16: 2, 64: 3}),
        ((1, 256), {16: 2, 8192: MAX_PREFILL_ROWS}),
        ((1, 64, 256), {16: 2, 512: MAX_PREFILL_ROWS, 8192: MAX_PREFILL_ROWS}),
    ],
)
def test_rows_of_a_prefill_bucket(row_sizes, rows):
    """An eighth of the tokens, within bounds."""
    ladder = Ladder(row_sizes, tuple(rows))
    assert {b.tokens: b.prefill_rows for b in ladder.all() if b.prefill_rows} == rows


def test_more_prompts_than_a_small_bucket_has_rows_take_a_larger_one():
    assert Ladder((1, 4), (16, 64)).choose(0, 9, 3) == Bucket(64, 4, 4)


@pytest.mark.parametrize(
    ("rows", "tokens", "culprit"),
    [
        ((), (16,), "row_sizes"),
        ((1,), (), "token_sizes"),
        ((4, 1), (16,), "row_sizes"),
        ((1, 1), (16,), "row_sizes"),
        ((0, 4), (16,), "row_sizes"),
        ((1,), (16, -1), "token_sizes"),
    ],
)
def test_bad_sizes_are_refused(rows, tokens, culprit):
    with pytest.raises(ValueError, match=culprit):
        Ladder(rows, tokens)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [((1, 8), (1, 2, 4, 8)), ((1, 6), (1, 2, 4, 6)), ((1, 1), (1,)), ((32, 512, 4), (32, 128, 512)), ((9, 5), (5,))],
)
def test_doubling(arguments, sizes):
    assert doubling(*arguments) == sizes
