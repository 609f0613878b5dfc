"""Which blocks each request holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.request import Request
from jaxserve.scheduling.block_pool import BlockPool


class KVManager:
    """Grows and frees the block tables of requests."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    @property
    def usage(self) -> float:
        """Share of the pool that is held, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int, spare: int) -> bool:
        """Whether a request without blocks could get them for this many tokens now, and leave ``spare`` blocks free."""
        return self.blocks_for(num_tokens) + spare <= self.pool.num_free

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
        # The tail first, so that the blocks of a prompt's beginning are reused last.
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []

    def check_integrity(self, requests: Iterable[Request]) -> None:
        self.pool.check_integrity(Counter(block for request in requests for block in request.block_ids))
