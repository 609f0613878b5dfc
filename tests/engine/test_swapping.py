"""What preempted requests have in host memory, and its way back."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.engine.swapping import Swaps
from jaxserve.request import SamplingParams
from jaxserve.scheduling.schedule import SchedulerOutput, Swap
from tests.conftest import SCARCE
from tests.engine.test_cache_equality import SWAP_SPACE


class Blocks:
    def __init__(self) -> None:
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        self.ready = True


class Swapper:
    """Fetches two arrays of each handle, one a call."""

    def __init__(self) -> None:
        self.advanced = 0

    def advance(self) -> None:
        self.advanced += 1

    def fetch(self, handle, arriving) -> bool:
        if all(blocks.ready for blocks in arriving) and len(arriving) < 2:
            arriving.append(Blocks())
            return False
        return all(blocks.ready for blocks in arriving)


class Runner:
    def __init__(self) -> None:
        self.swapper = Swapper()
        self.calls: list[tuple] = []

    def swap_out(self, block_ids):
        return [f"blocks {block_ids}"]

    def swap_in(self, handle, block_ids, arriving=()):
        self.calls.append((list(handle), block_ids, len(arriving)))


def swap_out(swaps: Swaps, *request_ids: str) -> None:
    swaps.run(SchedulerOutput(swap_out=tuple(Swap(name, [n]) for n, name in enumerate(request_ids))))


def swap_in(swaps: Swaps, request_id: str, block: int) -> None:
    swaps.run(SchedulerOutput(swap_in=(Swap(request_id, [block]),)))


def test_blocks_are_fetched_a_few_at_a_time_and_go_in_when_all_are_there():
    runner = Runner()
    swaps = Swaps(runner)
    swap_out(swaps, "a")
    assert not swaps.arrived("a") and not swaps.arrived("a") and len(swaps._arriving) == 1
    swaps._arriving[0].ready = True
    assert not swaps.arrived("a") and len(swaps._arriving) == 2
    swaps._arriving[1].ready = True
    assert swaps.arrived("a")
    swap_in(swaps, "a", 7)
    assert runner.calls == [(["blocks [0]"], [7], 2)]
    assert not swaps.wait(), "nothing is on its way any more"


def test_with_nothing_else_to_do_the_engine_waits_for_them():
    swaps = Swaps(Runner())
    assert not swaps.wait()
    swap_out(swaps, "a")
    assert not swaps.arrived("a") and swaps.wait() and not swaps.wait() and swaps.arrived("a")


def test_one_request_is_on_its_way_and_who_ends_is_forgotten():
    runner = Runner()
    swaps = Swaps(runner)
    swap_out(swaps, "a", "b")
    swaps.arrived("a")
    swaps.arrived("b")
    swap_in(swaps, "a", 3)
    assert runner.calls == [(["blocks [0]"], [3], 0)], "what was fetched for it has given way"
    handle = swaps._on_host["b"]
    swaps.forget("b")
    assert not handle, "freed, also where it is still to be copied"
    assert not swaps.wait() and swaps.arrived("b"), "as one that has nothing in host memory"


def test_what_has_not_left_yet_need_not_arrive():
    """Preempted and admitted again by the same step."""
    runner = Runner()
    swaps = Swaps(runner)
    assert swaps.arrived("a")
    swaps.run(SchedulerOutput(swap_out=(Swap("a", [1]),), swap_in=(Swap("a", [2]),)))
    assert runner.calls == [(["blocks [1]"], [2], 0)]


def test_every_step_sends_some_to_the_host():
    runner = Runner()
    swaps = Swaps(runner)
    swaps.advance()
    assert runner.swapper.advanced == 1
    runner.swapper = None
    swaps.advance()


def test_what_a_token_costs_is_learned_from_steps_that_computed_many(llm):
    """A sequence that comes back from the host computes one token, in the time of a whole step."""
    model = llm("tiny-llama-3.1", **SCARCE, async_depth=1, swap_space=SWAP_SPACE)
    engine = model.engine
    engine.events.clear()
    model.generate(list(range(3, 60)), SamplingParams(temperature=0.0, max_tokens=2))
    swap = engine.scheduler.swap
    assert swap is not None and swap.seconds_per_token > 0
    known = swap.seconds_per_token
    resumed = replace(engine.events[-1], prefill_requests=("r",), prefill_tokens=(1,), decode_requests=(), num_tokens=1)
    engine._learn_cost(resumed)
    assert swap.seconds_per_token == known
    engine._learn_cost(replace(resumed, prefill_tokens=(64,), num_tokens=64))
    assert swap.seconds_per_token != known
