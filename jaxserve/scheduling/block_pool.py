"""Fixed blocks of the KV cache, handed out by number and counted by reference."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``; block 0 belongs to nobody and takes the writes of padding."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold all together."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None, and nothing changed, if there are too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; those without any become free."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} released more often than it was taken"
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def check_integrity(self, owned: Counter[int]) -> None:
        """``owned``: how often each block stands in a request's table. Raises ``AssertionError`` if blocks were lost,
        doubled or given away twice."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert 0 not in free and 0 not in owned, "block 0 was handed out"
        for block in range(1, self.num_blocks):
            held = self._references[block]
            assert held == owned[block], f"block {block} has {held} references but {owned[block]} owners"
            assert (block in free) == (held == 0), f"block {block} is free and held, or neither"
