"""The scheduler by itself: no model, no jax."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve.request import FinishReason, SamplingParams, Status
from jaxserve.scheduling.draft import MAX_POSTPONED
from jaxserve.scheduling.schedule import DEVICE_TOKEN
from jaxserve.scheduling.scheduler import LOOKAHEAD, Scheduler
from jaxserve.scheduling.swap_space import SwapSpace
from tests.scheduling.factories import EOS, collect, make_request, make_scheduler, run_all, run_step


def sizes(step) -> dict[str, int]:
    return {row.request_id: len(row.token_ids) for row in step.rows}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_samples_at_its_end():
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_request(40, request_id="a"))
    steps = [run_step(scheduler) for _ in range(3)]
    assert [sizes(s)["a"] for s in steps] == [16, 16, 8]
    assert [s.rows[0].samples for s in steps] == [False, False, True]
    assert [s.rows[0].seq_len for s in steps] == [16, 32, 40]
    assert run_step(scheduler).decode[0].token_ids == [9]


def test_requests_join_while_others_decode_and_decoding_comes_first():
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request(4, request_id="a"))
    run_step(scheduler)
    scheduler.add(make_request(20, request_id="b"))
    step = run_step(scheduler)
    assert sizes(step) == {"a": 1, "b": 7}, "the decoding request gets its token, the prompt the rest of the budget"
    assert step.admitted == ("b",)


SIZES = {"step_sizes": (8, 16, 32, 64), "chunk_tokens": (6, 28)}


def test_steps_are_short_while_sequences_decode_and_longer_the_more_prompt_tokens_wait():
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=3, budget=64, **SIZES)
    scheduler.add(make_request(4, 50))
    run_step(scheduler)
    scheduler.add(make_request(40))
    step = run_step(scheduler)
    assert (len(step.decode), step.num_tokens) == (1, 8), "few tokens wait"
    scheduler.add(make_request(1000))
    steps = [run_step(scheduler) for _ in range(40)]
    sizes = [step.num_tokens for step in steps if step.prefill]
    assert sizes[0] == 32 and sizes[-1] <= 8, "many wait, then fewer"
    assert all(len(step.decode) >= 1 for step in steps), "nobody waits for a step"
    assert sorted(sizes, reverse=True) == sizes


def seven_decode(max_num_seqs: int, **limits: Any) -> Scheduler:
    how = SIZES | {"num_blocks": 400, "budget": 64, "prefill_rows": 8} | limits
    scheduler = make_scheduler(max_num_seqs=max_num_seqs, **how)
    for _ in range(7):
        scheduler.add(make_request(2, 50))
    run_step(scheduler)
    return scheduler


@pytest.mark.parametrize(
    ("decoding", "high", "tokens"), [(2, 28, 8), (4, 28, 16), (5, 28, 32), (7, 28, 32), (7, 8, 16)]
)
def test_steps_with_prompts_are_longer_the_more_sequences_decode(decoding, high, tokens):
    how = SIZES | {"chunk_tokens": (6, high)}
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=decoding + 1, budget=64, prefill_rows=16, **how)
    for _ in range(decoding):
        scheduler.add(make_request(2, 50))
    run_step(scheduler)
    scheduler.add(make_request(60))
    step = run_step(scheduler)
    assert (len(step.decode), step.num_tokens) == (decoding, tokens)


def test_the_rest_of_a_prompt_is_computed_at_once_beside_many_that_decode():
    """Where the next smaller size has room for a token or two, it takes them all to come to an end."""
    scheduler = seven_decode(max_num_seqs=16)
    scheduler.add(make_request(4, request_id="late"))
    step = run_step(scheduler)
    assert len(step.decode) == 7 and sizes(step)["late"] == 4


@pytest.mark.parametrize("decoding", [7, 8, 9, 15, 16, 17])
def test_a_single_token_is_never_left_behind(decoding):
    """A one-token prompt, or a sequence that comes back from the host, beside as many that decode as a size has."""
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=40, budget=64, prefill_rows=40, **SIZES)
    for _ in range(decoding):
        scheduler.add(make_request(2, 50))
    while len(scheduler.running) < decoding or any(not r.num_output_tokens for r in scheduler.running):
        run_step(scheduler)
    scheduler.add(make_request(1, request_id="one"))
    assert any("one" in sizes(run_step(scheduler)) for _ in range(MAX_POSTPONED + 1))


def test_prompts_that_would_leave_a_step_half_empty_wait_a_little_for_others():
    """Where most seats are taken."""
    scheduler = seven_decode(max_num_seqs=10)
    scheduler.add(make_request(4, request_id="early"))
    assert not run_step(scheduler).prefill and not run_step(scheduler).prefill
    scheduler.add(make_request(5, request_id="late"))
    step = run_step(scheduler)
    assert (sizes(step)["early"], sizes(step)["late"], step.num_tokens) == (4, 5, 16)


def test_nobody_waits_for_others_for_long():
    scheduler = seven_decode(max_num_seqs=8)
    for _ in range(2):
        scheduler.add(make_request(4, 2))
        steps = [bool(run_step(scheduler).prefill) for _ in range(8)]
        assert steps == [False] * MAX_POSTPONED + [True, False, False, False]


def test_the_last_prompts_of_a_batch_wait_for_nobody():
    scheduler = seven_decode(max_num_seqs=10, chunk_tokens=(64, 64))
    scheduler.add(make_request(4))
    assert run_step(scheduler).prefill


def test_where_few_decode_nobody_waits_for_others():
    scheduler = make_scheduler(num_blocks=400, max_num_seqs=4, budget=64, **SIZES)
    for _ in range(3):
        scheduler.add(make_request(2, 50))
    run_step(scheduler)
    for _ in range(4):
        scheduler.add(make_request(4))
    assert run_step(scheduler).prefill


def test_whether_others_join_depends_on_who_can_have_a_seat():
    """A queue behind full seats fills no step."""
    scheduler = seven_decode(max_num_seqs=8)
    for _ in range(9):
        scheduler.add(make_request(9, 40))
    step = run_step(scheduler)
    assert step.num_tokens == 16 and len(step.prefill) == 1


@pytest.mark.parametrize(("prompt", "sizes"), [(100, [64, 32, 4]), (40, [32, 8]), (60, [60]), (11, [11]), (5, [5])])
def test_where_nobody_decodes_steps_pad_less_than_another_step_would_cost(prompt, sizes):
    scheduler = make_scheduler(num_blocks=400, budget=64, **SIZES)
    scheduler.add(make_request(prompt))
    assert [run_step(scheduler).num_tokens for _ in sizes] == sizes


def test_held_requests_do_not_use_up_the_lookahead():
    scheduler = make_scheduler(num_blocks=400)
    for _ in range(LOOKAHEAD + 1):
        held = make_request(4)
        held.is_held = True
        scheduler.add(held)
    scheduler.add(make_request(4, request_id="ready"))
    assert set(sizes(run_step(scheduler))) == {"ready"}


def test_slots_bound_the_requests_that_run_and_the_first_come_is_first_served():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(2, max_tokens=2, request_id=name))
    assert set(sizes(run_step(scheduler))) == {"a", "b"}
    assert set(sizes(run_step(scheduler))) == {"a", "b"}
    assert set(sizes(run_step(scheduler))) == {"c"}


def test_prefill_rows_bound_the_prompts_of_a_step():
    scheduler = make_scheduler(prefill_rows=2)
    for name in "abc":
        scheduler.add(make_request(3, request_id=name))
    assert set(sizes(run_step(scheduler))) == {"a", "b"}
    assert sizes(run_step(scheduler)) == {"a": 1, "b": 1, "c": 3}


def test_when_blocks_run_out_the_latest_arrival_is_preempted_and_comes_back_first():
    scheduler = make_scheduler(num_blocks=1 + 5, block_size=4, budget=16)
    scheduler.add(make_request(8, max_tokens=8, request_id="a"))  # 2 blocks, grows to 4
    scheduler.add(make_request(8, max_tokens=8, request_id="b"))
    run_step(scheduler)
    scheduler.add(make_request(2, request_id="c"))
    step = run_step(scheduler)  # a takes the last block, b has to go
    assert step.preempted == ("b",)
    b = scheduler.get("b")
    assert b is not None and b.status is Status.WAITING and b.num_computed_tokens == 0 and not b.block_ids
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"], "before those that never ran"
    while scheduler.get("a"):
        run_step(scheduler)
    assert sizes(run_step(scheduler)) == {"b": 5, "c": 2}, "b's tokens are computed again, save the block still cached"
    assert b.num_preemptions == 1


def test_a_request_is_admitted_only_when_all_its_tokens_have_room():
    scheduler = make_scheduler(num_blocks=1 + 4, block_size=4, budget=8)
    scheduler.add(make_request(8, request_id="a", max_tokens=4))
    scheduler.add(make_request(12, request_id="b", max_tokens=2))
    while scheduler.get("a"):
        assert set(sizes(run_step(scheduler))) == {"a"}
    assert sizes(run_step(scheduler)) == {"b": 8}


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        (SamplingParams(temperature=0.0), EOS, FinishReason.STOP),
        (SamplingParams(temperature=0.0, ignore_eos=True), EOS, None),
        (SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(EOS,)), EOS, FinishReason.STOP),
        (SamplingParams(temperature=0.0, stop_token_ids=(5,)), 5, FinishReason.STOP),
        (SamplingParams(temperature=0.0), 5, None),
    ],
)
def test_what_ends_a_request(sampling, token, reason):
    scheduler = make_scheduler()
    request = make_request(2, max_tokens=3, sampling=sampling)
    scheduler.add(request)
    run_step(scheduler, token)
    assert request.finish_reason is reason
    if reason is None:
        run_step(scheduler, token)
        run_step(scheduler, token)
        assert request.finish_reason is FinishReason.LENGTH and request.num_output_tokens == 3
    assert len(scheduler) == 0


def test_two_steps_in_flight_use_the_token_that_only_the_device_knows():
    scheduler = make_scheduler()
    scheduler.add(make_request(3, max_tokens=3, request_id="a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first and second and second.decode[0].token_ids == [DEVICE_TOKEN] and second.decode[0].seq_len == 4
    third = scheduler.schedule()
    assert third and third.decode[0].seq_len == 5
    assert scheduler.schedule() is None, "the third token is the last: nothing is left to compute"
    for step in (first, second, third):
        finished = collect(scheduler, step)
    assert finished == ["a"] and len(scheduler) == 0


def test_a_stop_seen_late_drops_the_token_of_the_step_in_flight_and_frees_only_then():
    scheduler = make_scheduler()
    request = make_request(3, request_id="a")
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first and second
    assert collect(scheduler, first, EOS) == ["a"]
    assert request.block_ids and request.slot >= 0, "a step in flight still writes to them"
    collect(scheduler, second, 9)
    assert request.output_token_ids == [EOS] and not request.block_ids and len(scheduler) == 0


def test_no_block_is_taken_from_a_request_in_flight():
    scheduler = make_scheduler(num_blocks=1 + 5, block_size=4)
    for name in "ab":
        scheduler.add(make_request(7, max_tokens=8, request_id=name))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first and second, "both write their eighth token"
    assert scheduler.schedule() is None, "the next needs a preemption, and b is in flight"
    collect(scheduler, first)
    assert scheduler.schedule() is None
    collect(scheduler, second)
    step = scheduler.schedule()
    assert step and step.preempted == ("b",)


def test_an_id_in_use_is_refused_and_ending_twice_changes_nothing():
    scheduler = make_scheduler()
    request = make_request(3, request_id="a")
    scheduler.add(request)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make_request(3, request_id="a"))
    scheduler.finish(request, FinishReason.ABORT)
    scheduler.finish(request, FinishReason.STOP)
    assert request.finish_reason is FinishReason.ABORT and len(scheduler) == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_random_operations_lose_nothing(depth: int, seed: int):
    """Adds, aborts and steps in any order, with a pool that is often too small: every request that is not aborted
    comes to its end with all its tokens, and every block and slot comes back."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=1 + 12, block_size=4, budget=16)
    live, in_flight, done, aborted = {}, [], set(), set()
    preemptions = 0
    for turn in range(1500):
        if rng.random() < 0.25 and turn < 1200:
            prompt = rng.randint(1, 30)
            request = make_request(prompt, max_tokens=rng.randint(1, 48 - prompt))
            scheduler.add(request)
            live[request.request_id] = request
        if live and rng.random() < 0.03:
            request = live.pop(rng.choice(list(live)))
            if request.status is not Status.FINISHED:
                scheduler.finish(request, FinishReason.ABORT)
                aborted.add(request.request_id)
        while len(in_flight) < depth and (step := scheduler.schedule()):
            in_flight.append(step)
            preemptions += len(step.preempted)
        if in_flight:
            done.update(collect(scheduler, in_flight.pop(0), EOS if rng.random() < 0.01 else 9))
        scheduler.check_integrity()
    while len(scheduler):
        while len(in_flight) < depth and (step := scheduler.schedule()):
            in_flight.append(step)
        done.update(collect(scheduler, in_flight.pop(0)))
    assert preemptions > 10 and len(done) > 100
    assert set(live) <= done | aborted
    for request in live.values():
        ended_by_eos = request.finish_reason is FinishReason.STOP
        assert ended_by_eos or request.num_output_tokens == request.max_tokens
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


# ------------------------------------------------------------------ priorities and fairness


def order_of_admission(scheduler) -> list[str]:
    return [request_id for step in run_all(scheduler) for request_id in step.admitted]


def test_lower_priority_values_go_first_and_waiting_makes_up_for_priority():
    requests = {"batch": (0.0, 2), "normal": (5.0, 0), "urgent": (6.0, -1), "later": (30.0, 0)}
    for policy, expected in (
        ("priority", ["urgent", "normal", "batch", "later"]),  # 20 s after it came, batch goes before who comes then
        ("fcfs", ["batch", "normal", "urgent", "later"]),
    ):
        scheduler = make_scheduler(max_num_seqs=1, policy=policy)
        for name, (arrival, priority) in requests.items():
            scheduler.add(make_request(2, max_tokens=1, request_id=name, arrival_time=arrival, priority=priority))
        assert order_of_admission(scheduler) == expected


def test_the_least_urgent_is_preempted_and_among_equals_the_latest():
    scheduler = make_scheduler(num_blocks=1 + 7, policy="priority")
    for name, priority in (("low", 3), ("a", 0), ("c", 0)):
        scheduler.add(make_request(7, max_tokens=14, request_id=name, priority=priority))
        run_step(scheduler)
    preempted = []
    while len(preempted) < 2:
        preempted += run_step(scheduler).preempted
    assert preempted == ["low", "c"]


def test_sc12_preempted_requests_come_back_before_new_ones_and_are_preempted_few_times():
    """Steady arrivals, a pool too small: who has run goes before who has not, and everybody comes to an end."""
    rng = random.Random(1)
    scheduler = make_scheduler(num_blocks=1 + 16, max_num_seqs=8, budget=32, prefill_rows=8)
    requests, finished, preemptions = [], [], 0
    for turn in range(4000):
        if turn % 6 == 0 and len(requests) < 300:
            requests.append(make_request(rng.randint(1, 16), max_tokens=rng.randint(1, 40)))
            scheduler.add(requests[-1])
        step = scheduler.schedule()
        if step is None:
            continue
        for request_id in step.admitted:
            admitted = scheduler.get(request_id)
            earlier = [r for r in scheduler.waiting if r.num_preemptions and r.arrival_order < admitted.arrival_order]
            assert not earlier, "a request that had run was left behind"
        preemptions += len(step.preempted)
        finished += collect(scheduler, step)
    assert len(finished) == 300 and preemptions > 60
    assert max(r.num_preemptions for r in requests) <= 4
    assert all(r.num_output_tokens == r.max_tokens for r in requests)


def test_sc14_a_short_prompt_behind_long_ones_gets_its_token_within_two_steps():
    scheduler = make_scheduler(num_blocks=1 + 60_000, block_size=16, max_num_seqs=8, budget=2048)
    for index in range(3):
        scheduler.add(make_request(60_000, request_id=f"long{index}"))
    run_step(scheduler)
    short = make_request(20, request_id="short")
    scheduler.add(short)
    for _ in range(2):
        step = run_step(scheduler)
        assert step.num_tokens == 2048, "nothing of the budget is lost for it"
        assert sizes(step)["long0"] >= 1024
    assert short.num_output_tokens >= 1
    assert scheduler.get("long1").status is Status.WAITING, "its blocks would only lie idle"


def test_sc14_a_stream_of_short_prompts_leaves_a_long_one_its_half():
    scheduler = make_scheduler(num_blocks=1 + 400, block_size=16, max_num_seqs=64, budget=64, prefill_rows=64)
    long = make_request(640, request_id="long")
    scheduler.add(long)
    steps = 0
    while not long.num_output_tokens:
        for _ in range(4):
            scheduler.add(make_request(15, max_tokens=1))
        run_step(scheduler)
        steps += 1
    assert steps <= 640 / 32


def test_sc02_something_always_moves_while_requests_wait():
    """Mixed lengths, up to the whole pool's, aborts and preemption; whatever happens, a step can be scheduled while
    nothing is in flight."""
    rng = random.Random(2)
    scheduler = make_scheduler(num_blocks=1 + 12, budget=16)
    live = []
    for _ in range(3000):
        if rng.random() < 0.3:
            tokens = [rng.choice((5, 6)) for _ in range(rng.randint(1, 47))]  # many shared prefixes
            live.append(make_request(tokens, max_tokens=rng.randint(1, 48 - len(tokens))))
            scheduler.add(live[-1])
        if live and rng.random() < 0.1:
            scheduler.finish(live.pop(rng.randrange(len(live))), FinishReason.ABORT)
        step = scheduler.schedule()
        assert (step is not None) == bool(len(scheduler)), "requests wait and nothing moves"
        if step:
            collect(scheduler, step)


# ------------------------------------------------------------------ swap


def make_swapping_scheduler(**options):
    scheduler = make_scheduler(**options)
    scheduler.swap = SwapSpace(num_blocks=16, blocks_per_program=4, seconds_per_program=1.0)
    scheduler.swap.seconds_per_token = 1.0
    return scheduler


def test_a_victim_is_swapped_where_that_is_cheaper_and_goes_on_where_it_was():
    scheduler = make_swapping_scheduler(num_blocks=1 + 5)
    a, b = (make_request(8, max_tokens=8, request_id=name) for name in "ab")
    scheduler.add(a)
    scheduler.add(b)
    run_step(scheduler)
    held = list(b.block_ids)
    step = run_step(scheduler)
    assert step.preempted == ("b",) and [(s.request_id, s.block_ids) for s in step.swap_out] == [("b", held)]
    assert b.num_swapped_blocks == 2 and b.num_computed_tokens == 8
    assert scheduler.swap.num_free == 12, "a program's blocks, whole"
    while scheduler.get("a"):
        run_step(scheduler)
    step = run_step(scheduler)
    assert sizes(step) == {"b": 1} and [s.block_ids for s in step.swap_in] == [b.block_ids[:2]]
    assert step.rows[0].new_blocks == b.block_ids and scheduler.swap.num_free == 16


def test_who_was_swapped_out_is_admitted_when_its_blocks_are_near():
    scheduler = make_swapping_scheduler(num_blocks=1 + 5)
    asked = []
    scheduler.swap.arrived = lambda request_id: asked.append(request_id) or len(asked) > 2
    for name in "ab":
        scheduler.add(make_request(8, max_tokens=8, request_id=name))
    while scheduler.get("a"):
        run_step(scheduler)
    asked.clear()
    assert scheduler.schedule() is None and scheduler.schedule() is None, "on their way"
    assert [s.request_id for s in run_step(scheduler).swap_in] == ["b"] and asked == ["b"] * 3


def test_short_sequences_and_a_full_host_are_computed_again():
    swap = SwapSpace(num_blocks=16, blocks_per_program=4, seconds_per_program=1.0)
    assert not swap.pays(1, 1000), "nobody knows yet what a token costs"
    swap.seconds_per_token = 0.1
    assert swap.pays(4, 11) and not swap.pays(4, 10) and not swap.pays(5, 20) and swap.pays(5, 21)
    swap.take(9)
    assert swap.num_free == 4 and swap.pays(4, 11) and not swap.pays(5, 1000)


def test_what_ends_before_it_was_swapped_is_not_swapped_any_more():
    scheduler = make_swapping_scheduler()
    request = make_request(8)
    scheduler.add(request)
    run_step(scheduler)
    scheduler._preempt(request)
    scheduler.finish(request, FinishReason.ABORT)
    scheduler.add(make_request(3))
    assert run_step(scheduler).swap_out == () and scheduler.swap.num_free == 16
