"""How much room host memory has for the blocks of preempted requests, and when it pays to use it."""

from __future__ import annotations

from collections.abc import Callable

COST_WEIGHT = 0.1
"""Of a new measurement against all before."""


class SwapSpace:
    """Counts blocks; which lies where is the runner's business. Blocks move ``blocks_per_program`` at a time, and take
    that much room."""

    def __init__(
        self,
        num_blocks: int,
        blocks_per_program: int,
        seconds_per_program: float,
        arrived: Callable[[str], bool] = lambda request_id: True,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.seconds_per_token = 0.0
        """To compute a token again, as measured lately; nothing is swapped until that is known."""
        self.arrived = arrived
        """Whether the blocks of a request that is to be admitted are near; if not, they soon are."""
        self._blocks_per_program = blocks_per_program
        self._seconds_per_program = seconds_per_program

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether there is room, and moving so many blocks out and in again is estimated cheaper than to compute their
        tokens."""
        programs = -(-num_blocks // self._blocks_per_program)
        swapping, computing = programs * self._seconds_per_program, num_tokens * self.seconds_per_token
        return self.room(num_blocks) <= self.num_free and swapping < computing

    def learn(self, seconds_per_token: float) -> None:
        """What a prompt token cost in one step."""
        weight = COST_WEIGHT if self.seconds_per_token else 1
        self.seconds_per_token += (seconds_per_token - self.seconds_per_token) * weight

    def room(self, num_blocks: int) -> int:
        """Blocks of host memory that so many blocks take."""
        return -(-num_blocks // self._blocks_per_program) * self._blocks_per_program

    def take(self, num_blocks: int) -> None:
        self.num_free -= self.room(num_blocks)
        assert self.num_free >= 0

    def give_back(self, num_blocks: int) -> None:
        self.num_free += self.room(num_blocks)
        assert self.num_free <= self.num_blocks
