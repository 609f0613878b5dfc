"""Shared blocks: what is found again, what is not, and who waits for whom."""

from __future__ import annotations

import random

import pytest

from jaxserve.request import FinishReason, Status
from jaxserve.scheduling.block_hash import block_name, root_name
from tests.scheduling.factories import collect, make_request, make_scheduler, run_all, run_step

BLOCK = 4


def prompt(length: int, first: int = 100) -> list[int]:
    return list(range(first, first + length))


def computed(step) -> dict[str, int]:
    return {row.request_id: len(row.token_ids) for row in step.rows}


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_sc05_a_second_equal_prompt_computes_its_last_block_and_no_other(length):
    scheduler = make_scheduler()
    first, second = (make_request(prompt(length), max_tokens=1, request_id=name) for name in "ab")
    scheduler.add(first)
    run_all(scheduler)
    scheduler.add(second)
    [step] = run_all(scheduler)
    cached = (length - 1) // BLOCK * BLOCK
    assert second.num_cached_tokens == cached and computed(step) == {"b": length - cached}
    assert (step.queried_tokens, step.cached_tokens) == (length, cached)
    assert step.rows[0].seq_len == length and len(step.rows[0].new_blocks) == -(-length // BLOCK)


def test_sc05_a_different_tail_after_a_block_and_a_half_shares_the_block():
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt(9), request_id="a"))
    run_all(scheduler)
    other = make_request([*prompt(6), 7, 8, 9], request_id="b")
    scheduler.add(other)
    assert computed(run_step(scheduler)) == {"b": 5} and other.num_cached_tokens == BLOCK


def test_generated_tokens_are_found_too_save_the_last_which_was_never_computed():
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt(6), max_tokens=7, request_id="a"))
    run_all(scheduler, token=9)
    turn = make_request([*prompt(6), *[9] * 7, 5], request_id="b")
    scheduler.add(turn)
    run_step(scheduler)
    assert turn.num_cached_tokens == 12


def test_a_block_is_found_only_once_the_step_that_wrote_it_was_collected():
    scheduler = make_scheduler(prefill_rows=8)
    a = make_request(prompt(9), request_id="a")
    scheduler.add(a)
    step = scheduler.schedule()
    assert step and not scheduler.kv.find_cached(make_request(prompt(9)))
    scheduler.collect(step.rows[0], [9])
    assert scheduler.kv.find_cached(make_request(prompt(9))) == a.block_ids[:2]


def test_what_a_broken_request_wrote_or_read_is_found_by_nobody():
    scheduler = make_scheduler(budget=4)
    bad = make_request(prompt(12), request_id="bad")
    scheduler.add(bad)
    run_step(scheduler)
    assert len(scheduler.kv.find_cached(make_request(prompt(12)))) == 1
    step = scheduler.schedule()
    assert step
    scheduler.collect(step.rows[0], [], finite=False)
    scheduler.finish(bad, FinishReason.ERROR)
    assert not scheduler.kv.find_cached(make_request(prompt(12)))
    scheduler.check_integrity()


def test_what_a_request_wrote_that_failed_for_other_reasons_is_kept():
    scheduler = make_scheduler()
    request = make_request(prompt(12))
    scheduler.add(request)
    run_step(scheduler)
    scheduler.finish(request, FinishReason.ERROR)
    assert len(scheduler.kv.find_cached(make_request(prompt(13)))) == 3


def test_the_tail_of_a_chain_is_evicted_before_its_head_and_the_oldest_chain_first():
    scheduler = make_scheduler(num_blocks=1 + 8)
    for first in (100, 200):
        scheduler.add(make_request(prompt(12, first), max_tokens=1))
        run_all(scheduler)
    assert scheduler.kv.pool.num_cached == 6 and scheduler.kv.pool.num_evicted == 0
    scheduler.add(make_request(16, max_tokens=1))  # the two blank blocks and two of the first chain
    [step] = run_all(scheduler)
    assert step.num_evicted == 2
    assert len(scheduler.kv.find_cached(make_request(prompt(13, 100)))) == 1, "its head is still there"
    assert len(scheduler.kv.find_cached(make_request(prompt(13, 200)))) == 3


def test_reset_forgets_everything_and_harms_nobody_who_runs():
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt(8), max_tokens=6, request_id="a"))
    run_step(scheduler)
    scheduler.kv.reset_cache()
    scheduler.check_integrity()
    assert not scheduler.kv.find_cached(make_request(prompt(8)))
    run_all(scheduler)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


def test_without_prefix_caching_nothing_is_shared():
    scheduler = make_scheduler(prefix_caching=False)
    for _ in range(2):
        scheduler.add(make_request(prompt(8), max_tokens=1))
        [step] = run_all(scheduler)
        assert step.num_tokens == 8 and step.queried_tokens == 0
    assert scheduler.kv.pool.num_cached == 0


def test_a_request_that_wants_to_know_of_all_prompt_tokens_takes_no_cached_blocks():
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt(8), max_tokens=1))
    run_all(scheduler)
    asks = make_request(prompt(8), max_tokens=1)
    asks.takes_cached_blocks = False
    scheduler.add(asks)
    [step] = run_all(scheduler)
    assert step.num_tokens == 8 and step.queried_tokens == 0


# ------------------------------------------------------------------ names


def test_sc08_names_differ_unless_the_whole_chain_is_equal():
    root = root_name()
    base = [50, 60, 70, 80]
    name = block_name(root, base)
    assert name == block_name(root_name(), list(base)) and len(name) == 32
    others = [block_name(root, [50, 60 + 31, 70 - 1, 80]), block_name(root, [50 + 31, 60 - 1, 70, 80])]
    others += [block_name(root, base[::-1]), block_name(root, base[:3]), block_name(name, base), block_name(b"", base)]
    assert len({name, *others}) == 1 + len(others)


def test_sc08_an_equal_block_after_another_one_is_not_found():
    scheduler = make_scheduler()
    scheduler.add(make_request([1, 1, 1, 1, 5, 5, 5, 5, 0], max_tokens=1))
    run_all(scheduler)
    for tokens in ([2, 2, 2, 2, 5, 5, 5, 5, 0], [5, 5, 5, 5, 0], [1 + 31, 1 - 1, 1, 1, 0]):
        assert not scheduler.kv.find_cached(make_request(tokens))
    assert len(scheduler.kv.find_cached(make_request([1, 1, 1, 1, 5, 5, 5, 5, 0]))) == 2


def test_sc09_a_salt_keeps_requests_apart_and_imitates_no_other_part_of_a_name():
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt(9), max_tokens=1, cache_salt="tenant"))
    run_all(scheduler)
    assert len(scheduler.kv.find_cached(make_request(prompt(9), cache_salt="tenant"))) == 2
    for salt in (None, "", "other"):
        assert not scheduler.kv.find_cached(make_request(prompt(9), cache_salt=salt))
    circumstances = [{}, {"cache_salt": "x"}, {"adapter": "x"}, {"adapter": "x", "cache_salt": "x"}, {"cache_salt": ""}]
    circumstances += [{"cache_salt": "x" + "\x00" * 7 + "\x07adapter"}, {"cache_saltx": ""}]
    assert len({root_name(**c) for c in circumstances}) == len(circumstances)


# ------------------------------------------------------------------ waiting for one another


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_with_one_new_prefix_compute_it_once(depth):
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=64, prefill_rows=64, budget=16)
    for index in range(64):
        scheduler.add(make_request([*prompt(24), 1000 + index], max_tokens=3))
    in_flight, total = [], 0
    while len(scheduler):
        while len(in_flight) < depth and (step := scheduler.schedule()):
            in_flight.append(step)
            total += step.num_prefill_tokens
        collect(scheduler, in_flight.pop(0))
    assert total == 24 + 64, "the shared blocks once, then everybody's last token"


def test_who_waits_lets_others_pass():
    scheduler = make_scheduler(budget=8)
    for name, tokens in (("a", prompt(17)), ("b", prompt(17)), ("c", prompt(3, first=500))):
        scheduler.add(make_request(tokens, request_id=name, max_tokens=2))
    assert set(computed(run_step(scheduler))) == {"a", "c"}


@pytest.mark.parametrize("how", ["abort", "preempt", "error"])
def test_when_the_computing_one_goes_a_waiting_one_computes(how):
    scheduler = make_scheduler(budget=8, num_blocks=1 + 12)
    a, b = (make_request(prompt(20), request_id=name, max_tokens=4) for name in "ab")
    scheduler.add(a)
    scheduler.add(b)
    run_step(scheduler)
    step = scheduler.schedule()
    assert step and b.status is Status.WAITING
    if how == "preempt":
        collect(scheduler, step)
        scheduler._preempt(a)
        scheduler._preempted.clear()
    else:
        scheduler.finish(a, FinishReason.ABORT if how == "abort" else FinishReason.ERROR)
        collect(scheduler, step)
    done = {row.request_id for step in run_all(scheduler) for row in step.rows}
    assert "b" in done and b.num_output_tokens == 4


def test_the_more_urgent_never_waits_for_the_less_urgent():
    scheduler = make_scheduler(policy="priority", budget=8)
    scheduler.add(make_request(prompt(17), request_id="batch", priority=5))
    run_step(scheduler)
    scheduler.add(make_request(prompt(17), request_id="urgent"))
    assert "urgent" in computed(run_step(scheduler))


def test_op11_what_a_preempted_request_computes_again_counts_as_no_hit():
    """Random prompts in a small pool: the hit rate is 0 although preempted requests find their own blocks."""
    rng = random.Random(0)
    scheduler = make_scheduler(num_blocks=1 + 12)
    for _ in range(30):
        scheduler.add(make_request([rng.randrange(10**6) for _ in range(rng.randint(5, 20))], max_tokens=20))
    steps = run_all(scheduler)
    admissions = sum(len(step.admitted) for step in steps)
    assert sum(len(step.preempted) for step in steps) > 10 and admissions > 40
    assert sum(step.cached_tokens for step in steps) == 0 < sum(step.queried_tokens for step in steps)
    computed_tokens = sum(step.num_tokens for step in steps)
    assert computed_tokens < sum(row.seq_len for step in steps for row in step.prefill) + 30 * 20


def test_sc15_shared_blocks_are_counted_once():
    """256 requests with one prefix, then idle: free, cached and used blocks add up after each step."""
    scheduler = make_scheduler(num_blocks=1 + 40, max_num_seqs=16, prefill_rows=16, budget=64)
    for index in range(256):
        scheduler.add(make_request([*prompt(24), 1000 + index], max_tokens=5))
    pool = scheduler.kv.pool
    while len(scheduler):
        run_step(scheduler)
        used = {block for request in scheduler.running for block in request.block_ids}
        assert len(used) + pool.num_free == pool.num_usable
        assert scheduler.kv.usage == pytest.approx(len(used) / pool.num_usable)
    assert pool.num_free == pool.num_usable >= pool.num_cached > 6 and scheduler.kv.usage == 0
