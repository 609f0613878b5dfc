"""One structured record a step: what metrics, notebooks and a crash report are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.runner.buckets import Bucket
from jaxserve.scheduling.schedule import SchedulerOutput, Swap


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step as it was collected. Times are ``time.monotonic()`` seconds."""

    submitted: float
    collected: float
    schedule_seconds: float
    """Host time to decide what the step computes …"""
    submit_seconds: float
    """… to pack and dispatch it …"""
    wait_seconds: float
    """… and to wait for its result, once it was the oldest in flight."""
    bucket: str
    compiled: int
    """Programs compiled since the step before; while serving there should be none."""
    decode_requests: tuple[str, ...]
    prefill_requests: tuple[str, ...]
    prefill_tokens: tuple[int, ...]
    """Tokens computed for each of those."""
    num_tokens: int
    """Tokens that the step computed …"""
    padded_tokens: int
    """… and the tokens of the bucket that it ran in."""
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    swapped_out: tuple[str, ...]
    """Of those, who went to host memory instead of being computed again, and who came back from there."""
    swapped_in: tuple[str, ...]
    swapped_blocks: tuple[int, int]
    """Out and in."""
    queried_tokens: int
    """Tokens of first admitted requests that looked for cached blocks …"""
    cached_tokens: int
    """… and how many of those they found."""
    num_evicted: int
    """Cached blocks that gave way."""
    finished: tuple[str, ...]
    running: int
    waiting: int
    free_blocks: int

    @property
    def kind(self) -> str:
        """decode, prefill or mixed."""
        if not self.prefill_requests:
            return "decode"
        return "mixed" if self.decode_requests else "prefill"


def step_event(schedule: SchedulerOutput, bucket: Bucket, **measured: Any) -> StepEvent:
    """The record of a step: what it computed, and the fields that only who ran it knows."""
    return StepEvent(
        bucket=str(bucket),
        decode_requests=tuple(r.request_id for r in schedule.decode),
        prefill_requests=tuple(r.request_id for r in schedule.prefill),
        prefill_tokens=tuple(len(r.token_ids) for r in schedule.prefill),
        num_tokens=schedule.num_tokens,
        padded_tokens=bucket.tokens,
        admitted=schedule.admitted,
        preempted=schedule.preempted,
        swapped_out=tuple(swap.request_id for swap in schedule.swap_out),
        swapped_in=tuple(swap.request_id for swap in schedule.swap_in),
        swapped_blocks=(_num_blocks(schedule.swap_out), _num_blocks(schedule.swap_in)),
        queried_tokens=schedule.queried_tokens,
        cached_tokens=schedule.cached_tokens,
        num_evicted=schedule.num_evicted,
        **measured,
    )


def _num_blocks(swaps: Iterable[Swap]) -> int:
    return sum(len(swap.block_ids) for swap in swaps)


def to_json(events: Iterable[StepEvent]) -> bytes:
    """The events as a JSON array, the oldest first, a line each."""
    return b"[" + b",\n".join(map(msgspec.json.encode, events)) + b"]"
