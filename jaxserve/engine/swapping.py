"""What preempted requests have in host memory, and its way there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax

from jaxserve.runner.swap import SWAP_BLOCKS, SwapHandle, Swapper
from jaxserve.scheduling.schedule import SchedulerOutput
from jaxserve.scheduling.swap_space import SwapSpace


class SwappingRunner(Protocol):
    swapper: Swapper | None
    """Room in host memory; None: there is none, and the rest is never called."""

    def swap_out(self, block_ids: Sequence[int]) -> SwapHandle: ...

    def swap_in(
        self, handle: SwapHandle, block_ids: Sequence[int], arriving: list[jax.Array] | None = None
    ) -> None: ...


class Swaps:
    """The blocks of one request at a time are on their way back to the device, while others decode; only then is it
    admitted."""

    def __init__(self, runner: SwappingRunner) -> None:
        self._runner = runner
        self._on_host: dict[str, SwapHandle] = {}
        self._next = ""
        """The request whose blocks are on their way …"""
        self._arriving: list[jax.Array] = []
        """… and these."""

    def make_space(self) -> SwapSpace | None:
        """What the scheduler needs to know; None if there is no room."""
        host = self._runner.swapper
        return None if host is None else SwapSpace(host.num_blocks, SWAP_BLOCKS, host.seconds_per_program, self.arrived)

    def run(self, schedule: SchedulerOutput) -> None:
        """Submit what a step needs to be done before it."""
        for swap in schedule.swap_out:
            self._on_host[swap.request_id] = self._runner.swap_out(swap.block_ids)
        for swap in schedule.swap_in:
            arriving = self._arriving if swap.request_id == self._next else []
            self._runner.swap_in(self._on_host[swap.request_id], swap.block_ids, arriving)
            self.forget(swap.request_id)

    def advance(self) -> None:
        """Once a step: a little more goes to the host."""
        if self._runner.swapper is not None:
            self._runner.swapper.advance()

    def arrived(self, request_id: str) -> bool:
        """Whether the blocks of a request that is to be admitted are on the device; if not, a few more are fetched."""
        if request_id not in self._on_host:
            return True  # they have not left yet
        if request_id != self._next:
            self._next, self._arriving = request_id, []
        assert self._runner.swapper is not None
        return self._runner.swapper.fetch(self._on_host[request_id], self._arriving)

    def wait(self) -> bool:
        """Wait for blocks on their way; False if all are there."""
        if not self._next:
            return False
        jax.block_until_ready(self._arriving)
        return not self.arrived(self._next)

    def forget(self, request_id: str) -> None:
        self._on_host.pop(request_id, []).clear()
        if request_id == self._next:
            self._next, self._arriving = "", []
