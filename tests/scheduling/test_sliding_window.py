"""Blocks that a sliding window has passed are free again."""

from __future__ import annotations

import random

import pytest

from jaxserve.request import FinishReason
from jaxserve.scheduling.draft import Draft
from tests.scheduling.factories import collect, make_request, make_scheduler, run_all, run_step


def test_a_long_generation_holds_the_window_and_a_block_or_two():
    """32k tokens, a window of 4k, in a pool that could not hold the half of it."""
    scheduler = make_scheduler(num_blocks=1 + 600, block_size=16, budget=256, window=4096)
    request = make_request(300, max_tokens=32_000)
    scheduler.add(request)
    most = 0
    while len(scheduler):
        step = scheduler.schedule()
        assert step
        scheduler.collect(step.rows[0], [9] if step.rows[0].samples else [])
        most = max(most, scheduler.kv.pool.num_usable - scheduler.kv.pool.num_free)
    scheduler.check_integrity()
    assert request.num_output_tokens == 32_000
    assert most <= 4096 // 16 + 2


@pytest.mark.parametrize("depth", [1, 2])
def test_no_block_is_freed_that_a_later_token_sees(depth):
    scheduler = make_scheduler(num_blocks=1 + 40, budget=8, window=10)
    request = make_request(30, max_tokens=30)
    scheduler.add(request)
    in_flight = []
    while len(scheduler):
        while len(in_flight) < depth and (step := scheduler.schedule()):
            in_flight.append(step)
            [row] = step.rows
            first = row.seq_len - len(row.token_ids)  # the first query of the step
            seen = range(max(first - 9, 0), row.seq_len)
            assert all(request.block_ids[position // 4] for position in seen)
        collect(scheduler, in_flight.pop(0))
    assert request.num_output_tokens == 30


def test_a_long_prompt_is_found_again_and_only_what_is_seen_of_it_is_held():
    scheduler = make_scheduler(num_blocks=1 + 40, budget=16, window=8)
    for _ in range(2):
        request = make_request([5] * 61, max_tokens=1)
        scheduler.add(request)
        step = scheduler.schedule()
        assert step
        if request.num_cached_tokens:
            break
        collect(scheduler, step)
        run_all(scheduler)
    assert request.num_cached_tokens == 60
    assert request.block_ids[:13] == [0] * 13 and all(request.block_ids[13:])
    assert step.rows[0].new_blocks == request.block_ids
    scheduler.check_integrity()


def test_a_long_prompt_whose_first_blocks_are_cached_fits_into_the_least_pool():
    """The cached blocks that the window sees still count once, not twice."""
    window, budget, size = 32, 16, 4
    scheduler = make_scheduler(num_blocks=1 + (window + budget) // size + 2, budget=budget, window=window)
    scheduler.add(make_request([5] * 25, max_tokens=2))
    run_all(scheduler)
    long = make_request([5] * 100, max_tokens=2)
    scheduler.add(long)
    run_all(scheduler)
    assert long.num_output_tokens == 2 and long.num_cached_tokens == 24


def test_a_prompt_larger_than_the_pool_goes_through_it():
    scheduler = make_scheduler(num_blocks=1 + 8, budget=8, window=8)
    request = make_request(400, max_tokens=3)
    scheduler.add(request)
    run_all(scheduler)
    assert request.num_output_tokens == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_random_operations_with_a_window_lose_nothing(depth):
    rng = random.Random(depth)
    scheduler = make_scheduler(num_blocks=1 + 10, budget=16, window=12)
    live, in_flight, preempted, cached = [], [], 0, 0
    for turn in range(2000):
        if turn < 1500 and rng.random() < 0.25:
            tokens = [rng.choice((5, 6)) for _ in range(rng.randint(1, 60))]
            live.append(make_request(tokens, max_tokens=rng.randint(1, 60)))
            scheduler.add(live[-1])
        if live and rng.random() < 0.05:
            scheduler.finish(live.pop(rng.randrange(len(live))), FinishReason.ABORT)
        while len(in_flight) < depth and (step := scheduler.schedule()):
            in_flight.append(step)
            preempted += len(step.preempted)
            cached += step.cached_tokens
        if in_flight:
            collect(scheduler, in_flight.pop(0))
    while len(in_flight):
        collect(scheduler, in_flight.pop(0))
    while len(scheduler):
        run_step(scheduler)
    assert all(r.num_output_tokens == r.max_tokens for r in live)
    assert preempted > 5 and cached > 0


def test_a_step_tells_the_device_of_passed_blocks_too():
    """They are among a swapped sequence's new blocks, of which a step has room for so many."""
    scheduler = make_scheduler(num_blocks=1 + 40, window=8)
    request = make_request(40)
    request.num_swapped_blocks, request.num_computed_tokens = 2, 40
    passed = [0] * scheduler.kv.passed_blocks(40)
    draft = Draft(scheduler.limits)
    draft.cached_blocks = len(passed) + 2
    assert scheduler._fits(request, passed, draft)
    draft.cached_blocks -= 1
    assert not scheduler._fits(request, passed, draft)
