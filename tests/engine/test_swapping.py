"""What preempted requests have in host memory, and its way back."""

from __future__ import annotations

from jaxserve.engine.swapping import Swaps
from jaxserve.scheduling.schedule import SchedulerOutput, Swap


class Blocks:
    def __init__(self) -> None:
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        self.ready = True


class Runner:
    swapper = None

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.fetched: list[Blocks] = []

    def swap_out(self, block_ids):
        return [f"blocks {block_ids}"]

    def fetch(self, handle):
        self.calls.append(("fetch", handle))
        self.fetched.append(Blocks())
        return self.fetched[-1:]

    def swap_in(self, handle, block_ids, arriving=()):
        self.calls.append(("swap in", handle, block_ids, list(arriving)))


def swap_out(swaps: Swaps, *request_ids: str) -> None:
    swaps.run(SchedulerOutput(swap_out=tuple(Swap(name, [n]) for n, name in enumerate(request_ids))))


def swap_in(swaps: Swaps, request_id: str, block: int) -> None:
    swaps.run(SchedulerOutput(swap_in=(Swap(request_id, [block]),)))


def test_blocks_are_fetched_once_and_go_in_when_they_are_there():
    runner = Runner()
    swaps = Swaps(runner)
    swap_out(swaps, "a")
    assert not swaps.arrived("a") and not swaps.arrived("a")
    runner.fetched[0].ready = True
    assert swaps.arrived("a")
    swap_in(swaps, "a", 7)
    assert runner.calls == [("fetch", ["blocks [0]"]), ("swap in", ["blocks [0]"], [7], runner.fetched)]
    assert not swaps.wait(), "nothing is on its way any more"


def test_with_nothing_else_to_do_the_engine_waits_for_them():
    runner = Runner()
    swaps = Swaps(runner)
    assert not swaps.wait()
    swap_out(swaps, "a")
    swaps.arrived("a")
    assert swaps.wait() and swaps.arrived("a") and not swaps.wait()


def test_one_request_is_on_its_way_and_who_ends_is_forgotten():
    runner = Runner()
    swaps = Swaps(runner)
    swap_out(swaps, "a", "b")
    swaps.arrived("a")
    swaps.arrived("b")
    swap_in(swaps, "a", 3)
    assert runner.calls[-1] == ("swap in", ["blocks [0]"], [3], []), "what was fetched for it has given way"
    swaps.forget("b")
    assert not swaps.wait() and swaps.arrived("b"), "as one that has nothing in host memory"


def test_what_has_not_left_yet_need_not_arrive():
    """Preempted and admitted again by the same step."""
    runner = Runner()
    swaps = Swaps(runner)
    assert swaps.arrived("a") and not runner.calls
    swaps.run(SchedulerOutput(swap_out=(Swap("a", [1]),), swap_in=(Swap("a", [2]),)))
    assert runner.calls == [("swap in", ["blocks [1]"], [2], [])]
