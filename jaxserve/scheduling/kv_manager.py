"""Which blocks each request holds, and which of them it shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.request import Request
from jaxserve.scheduling.block_hash import block_name, root_name
from jaxserve.scheduling.block_pool import BlockPool
from jaxserve.scheduling.schedule import MAX_CACHED_BLOCKS


class KVManager:
    """Grows and frees the block tables of requests, and finds blocks that were computed before.

    A full block is published when the step that wrote it has been collected: then its tokens are known, and known to
    be finite. Until then it is announced by the request that computes it, so that others can wait instead of
    computing it too.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, window: int | None = None
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.window = window
        """Tokens that the layer with the widest view sees, the current one included; None if a layer sees all."""
        self.prefix_caching = prefix_caching
        self._announced: dict[bytes, Request] = {}
        """The next block of each request that runs and has one whose tokens are known, by name."""

    @property
    def usage(self) -> float:
        """Share of the pool that is held, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def passed_blocks(self, num_tokens: int) -> int:
        """How many of a sequence's first blocks no later token sees once this many tokens are computed."""
        return 0 if self.window is None else max(num_tokens + 1 - self.window, 0) // self.block_size

    def fits(self, num_tokens: int, cached: list[int], spare: int) -> bool:
        """Whether a request without blocks could get them for this many tokens now, the ``cached`` ones among them,
        and leave ``spare`` blocks free."""
        taken = sum(block > 0 and not self.pool.is_held(block) for block in cached)
        return self.blocks_for(num_tokens) - len(cached) + taken + spare <= self.pool.num_free

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for its first ``num_tokens`` tokens; False if they are too few."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.block_ids += blocks
        return True

    def free(self, request: Request) -> None:
        """Take the request's blocks away."""
        self.withdraw_announcement(request)
        # The tail first: it is of no use without the beginning, and the beginning is what others are likely to share.
        self.pool.release(reversed(request.block_ids[request.num_passed_blocks :]))
        request.block_ids = []
        request.num_published_blocks = request.num_passed_blocks = 0

    def free_passed(self, request: Request, num_tokens: int) -> None:
        """Free the blocks that the window has passed when this many tokens are computed. They become block 0; the
        device's table may still name them, but nothing looks at it there."""
        first, end = request.num_passed_blocks, self.passed_blocks(num_tokens)
        if end > first:
            self.pool.release(request.block_ids[first:end])
            request.block_ids[first:end] = [0] * (end - first)
            request.num_passed_blocks = end

    def find_cached(self, request: Request) -> list[int]:
        """The blocks that hold the request's first tokens already. Its last token is never among them, since somebody
        must compute what comes next; it is computed with its whole block, so that no shared block is written. Block 0
        stands for those that the window has passed by then."""
        if not self.prefix_caching or not request.takes_cached_blocks:
            return []
        blocks: list[int] = []
        for index in range(min((request.num_tokens - 1) // self.block_size, MAX_CACHED_BLOCKS)):
            block = self.pool.find(self._name(request, index))
            if block is None:
                break
            blocks.append(block)
        passed = self.passed_blocks(len(blocks) * self.block_size)
        blocks[:passed] = [0] * passed
        return blocks

    def awaited(self, request: Request, num_cached: int) -> bytes | None:
        """The name of the request's block after its cached ones, if somebody of no lower priority computes it now."""
        if not self.prefix_caching or not request.takes_cached_blocks:
            return None
        if num_cached >= (request.num_tokens - 1) // self.block_size:
            return None
        name = self._name(request, num_cached)
        owner = self._announced.get(name)
        return None if owner is None or owner.priority > request.priority else name

    def is_announced(self, name: bytes) -> bool:
        """Whether somebody is still computing the block of this name."""
        return name in self._announced

    def held_blocks(self, request: Request) -> list[int]:
        """The request's blocks that hold computed tokens."""
        return request.block_ids[request.num_passed_blocks : self.blocks_for(request.num_computed_tokens)]

    def take_swapped(self, request: Request, num_tokens: int) -> list[int]:
        """Give blocks for ``num_tokens`` tokens to a request that was swapped out; returns those for what it held."""
        passed = self.passed_blocks(request.num_computed_tokens)
        request.num_passed_blocks = passed
        request.block_ids = [0] * passed
        grown = self.grow(request, num_tokens)
        assert grown, "blocks vanished between the check and the allocation"
        return self.held_blocks(request)

    def take_cached(self, request: Request, blocks: list[int]) -> None:
        """Begin the request's table with blocks that ``find_cached`` gave."""
        assert not request.block_ids
        request.num_passed_blocks = self.passed_blocks(len(blocks) * self.block_size)
        self.pool.acquire(blocks[request.num_passed_blocks :])
        request.block_ids = list(blocks)
        request.num_published_blocks = len(blocks)

    def announce(self, request: Request) -> None:
        """Others may wait for the request's next block."""
        index = request.num_published_blocks
        if self.prefix_caching and (index + 1) * self.block_size <= len(request.token_ids):
            name = self._name(request, index)
            if self._announced.setdefault(name, request) is request:
                request.announced_block = name

    def publish(self, request: Request, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of the request are in its blocks: let others find the full ones."""
        if not self.prefix_caching:
            return
        full = num_tokens // self.block_size
        for index in range(max(request.num_published_blocks, request.num_passed_blocks), full):
            self.pool.publish(request.block_ids[index], self._name(request, index))
        request.num_published_blocks = full
        self.withdraw_announcement(request)
        self.announce(request)

    def withdraw_announcement(self, request: Request) -> None:
        """The request computes its next block no more."""
        if request.announced_block is not None:
            del self._announced[request.announced_block]
            request.announced_block = None

    def distrust(self, request: Request) -> None:
        """The request's KV went wrong: nobody else shall find the blocks that it wrote or read."""
        self.pool.withdraw(request.block_ids[request.num_passed_blocks :])

    def reset_cache(self) -> None:
        """Forget what all blocks hold."""
        self.pool.withdraw_all()

    def _name(self, request: Request, index: int) -> bytes:
        names = request.block_names
        if not names:
            salt = request.cache_salt
            names.append(root_name() if salt is None else root_name(cache_salt=salt))
        while len(names) < index + 2:
            start = (len(names) - 1) * self.block_size
            names.append(block_name(names[-1], request.token_ids[start : start + self.block_size]))
        return names[index + 1]

    def check_integrity(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        held = [request.block_ids[request.num_passed_blocks :] for request in requests]
        self.pool.check_integrity(Counter(block for blocks in held for block in blocks))
        announced = {request.announced_block: request for request in requests if request.announced_block is not None}
        assert announced == self._announced, "a block is announced by nobody who computes it"
        for request in requests:
            assert request.num_published_blocks <= len(request.block_ids)
            assert not any(request.block_ids[: request.num_passed_blocks])
