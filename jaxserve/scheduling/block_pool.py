"""Fixed blocks of the KV cache, handed out by number, counted by reference, and found again by what they hold."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``; block 0 belongs to nobody and takes the writes of padding.

    A published block has a name, under which it is found. It keeps name and content when its last reference is dropped,
    until it is evicted: the least recently released first, and only when no blank block is left.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blank = deque(range(1, num_blocks))
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Published blocks that nobody holds, the next to be evicted first."""
        self._references = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self.num_evicted = 0
        """Since the start."""

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold all together."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, published or not."""
        return len(self._blank) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """Of those, how many are published."""
        return len(self._unused)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None, and nothing changed, if there are too few."""
        if count > self.num_free:
            return None
        blocks = [self._blank.popleft() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        self.num_evicted += 1
        return block

    def find(self, name: bytes) -> int | None:
        """The block of this name. It may be evicted at any time unless it is acquired."""
        return self._published.get(name)

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference of each of these blocks, which ``find`` gave."""
        for block in blocks:
            if not self._references[block]:
                del self._unused[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; those without any become free, and are evicted in this order."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} released more often than it was taken"
            self._references[block] -= 1
            if not self._references[block]:
                if self._names[block] is None:
                    self._blank.append(block)
                else:
                    self._unused[block] = None

    def publish(self, block: int, name: bytes) -> None:
        """From now on the block, which somebody holds, is found under this name, unless another one is."""
        assert self._references[block] > 0, f"block {block} is published, but nobody holds it"
        if self._names[block] is None and name not in self._published:
            self._names[block] = name
            self._published[name] = block

    def withdraw(self, blocks: Iterable[int]) -> None:
        """These blocks are found no more; those who hold them keep them."""
        for block in blocks:
            self._forget(block)
            if block in self._unused:
                del self._unused[block]
                self._blank.append(block)

    def withdraw_all(self) -> None:
        self.withdraw(list(self._published.values()))

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._published[name]
            self._names[block] = None

    def check_integrity(self, owned: Counter[int]) -> None:
        """``owned``: how often each block stands in a request's table. Raises ``AssertionError`` if blocks were lost,
        doubled or given away twice."""
        free = {*self._blank, *self._unused}
        assert len(free) == self.num_free, "a block is free twice"
        assert 0 not in free and 0 not in owned, "block 0 was handed out"
        for block in range(1, self.num_blocks):
            held, name = self._references[block], self._names[block]
            assert held == owned[block], f"block {block} has {held} references but {owned[block]} owners"
            assert (block in free) == (held == 0), f"block {block} is free and held, or neither"
            assert (block in self._unused) == (held == 0 and name is not None), f"block {block} is in the wrong list"
            assert name is None or self._published[name] == block, f"block {block} is not found under its name"
        assert len(self._published) == sum(name is not None for name in self._names), "a name leads to no block"
