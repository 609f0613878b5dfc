"""What must be true of a scheduler between any two calls. Tests ask after each; it costs too much for every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxserve.request import Request, Status

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler


def check_integrity(scheduler: Scheduler, requests: list[Request], free_slots: list[int]) -> None:
    """Raises ``AssertionError`` if a block, on the device or in host memory, a slot or a request was lost or doubled.
    ``requests`` are all that the scheduler knows."""
    scheduler.kv.check_integrity(requests)
    slots = [r.slot for r in requests if r.slot >= 0] + free_slots
    assert sorted(slots) == list(range(scheduler.limits.max_num_seqs)), f"slots lost or doubled: {sorted(slots)}"
    scheduler.waiting.check_integrity()
    _check_listed(scheduler.waiting, requests, Status.WAITING)
    _check_listed(scheduler.running, requests, Status.RUNNING)
    if scheduler.swap is not None:
        swapped = sum(scheduler.swap.room(r.num_swapped_blocks) for r in requests)
        assert swapped + scheduler.swap.num_free == scheduler.swap.num_blocks, "host blocks were lost or doubled"
    for request in requests:
        _check_request(request, scheduler.kv.blocks_for(request.num_computed_tokens))


def _check_request(request: Request, num_blocks: int) -> None:
    """``num_blocks``: what its computed tokens need."""
    assert request.num_computed_tokens <= request.num_tokens
    assert 0 <= request.num_in_flight <= request.steps_in_flight
    match request.status:
        case Status.WAITING:
            assert not request.block_ids and not request.steps_in_flight and request.slot < 0
            assert request.num_swapped_blocks or not request.num_computed_tokens
        case Status.RUNNING:
            assert len(request.block_ids) >= num_blocks, f"{request.request_id} lacks blocks for its computed tokens"
            assert not request.num_swapped_blocks
        case Status.FINISHED:
            assert request.steps_in_flight, f"{request.request_id} is finished but was not forgotten"


def _check_listed(listed: Iterable[Request], requests: list[Request], status: Status) -> None:
    ids = [r.request_id for r in listed]
    assert len(set(ids)) == len(ids), f"a {status.value} request is listed twice"
    assert set(ids) == {r.request_id for r in requests if r.status is status}, f"{status.value} list is wrong"
