"""KV blocks to pinned host memory and back, in programs of ``SWAP_BLOCKS`` blocks; back also in larger ones.

A gather collects blocks in arrays on the device, whose way to the host, and later back, is a plain copy beside the
programs of later steps; a scatter puts them into the cache. Order is kept by the arrays alone: the gather reads the
cache as the steps submitted before leave it, and whatever is submitted afterwards may overwrite the blocks. One array
of ``PIECE`` blocks at a time is on its way in either direction: a step's own few bytes go the same ways, and wait
behind it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.models.kv_cache import CACHE_SPEC, KVCache
from jaxserve.runner.programs import check_aliased

logger = logging.getLogger(__name__)

Array = jax.Array
SwapHandle = list[Array]
"""Blocks in host memory, or gathered and still to go there, PIECE an array ``[layers, 2, PIECE, B, K, D]``. Clearing it
frees them."""

SWAP_BLOCKS = 64
SCATTERS = (256, SWAP_BLOCKS)
"""Blocks of each program that swaps in: its kernels are two a layer, however many blocks there are."""
PIECE = 32
"""Of Llama-3.1-8B, 64 MiB: 1.5 ms each way."""
IN_FLIGHT = 16
"""Pieces that may lie on the device, each way, beside the cache: the memory for them is set aside."""
_SPEC = P(None, None, *CACHE_SPEC)


def reserved_bytes(block_bytes: int) -> int:
    """Device memory for blocks on their way, gathered and while they are being put together."""
    return (2 * IN_FLIGHT * PIECE + 2 * SWAP_BLOCKS) * block_bytes


def host_bytes(cache: KVCache, num_blocks: int) -> int:
    """Bytes of host memory for so many blocks."""
    return num_blocks * sum(a.dtype.itemsize * int(np.prod(a.shape[1:])) for a in jax.tree.leaves(cache))


class Swapper:
    """The programs, compiled from the cache's shapes, and how long they take.

    ``num_blocks`` is what fits in ``space`` bytes, in whole programs.
    """

    def __init__(self, cache: KVCache, mesh: Mesh, space: int) -> None:
        self.num_blocks = space // host_bytes(cache, SWAP_BLOCKS) * SWAP_BLOCKS
        self.seconds_per_program = 0.0
        """For SWAP_BLOCKS blocks to the host and back, as measured by ``warm_up``."""
        self._cache_blocks: int = cache[0][0].shape[0]
        self._on_device = NamedSharding(mesh, _SPEC)
        self._on_host = NamedSharding(mesh, _SPEC, memory_kind="pinned_host")
        shape = (len(cache), 2, PIECE, *cache[0][0].shape[1:])
        piece = jax.ShapeDtypeStruct(shape, cache[0][0].dtype, sharding=self._on_device)
        ids = {size: jax.ShapeDtypeStruct((size,), np.int32, sharding=NamedSharding(mesh, P())) for size in SCATTERS}
        gather: Any = jax.jit(_gather, out_shardings=self._on_device)
        self._gather: Any = gather.lower(cache, ids[SWAP_BLOCKS]).compile()
        scatter: Any = jax.jit(_scatter, donate_argnums=0)
        self._scatters = {n: scatter.lower(cache, ids[n], (piece,) * (n // PIECE)).compile() for n in SCATTERS}
        for program in self._scatters.values():
            check_aliased(program, cache, "the program that swaps in")
        self._gathered: deque[tuple[SwapHandle, int]] = deque()
        """Arrays that are still to go to the host …"""
        self._leaving: deque[ref[Array]] = deque()
        """… and those on their way, the oldest first."""

    def swap_out(self, cache: KVCache, block_ids: Sequence[int]) -> SwapHandle:
        """Gathers these blocks; ``advance`` takes them to the host."""
        handle: SwapHandle = []
        for start in range(0, len(block_ids), SWAP_BLOCKS):
            while len(self._gathered) + len(self._leaving) > IN_FLIGHT - SWAP_BLOCKS // PIECE:
                self._take_one()
                if self._leaving:
                    jax.block_until_ready(self._leaving.popleft()())
            pieces = self._gather(cache, self._padded(block_ids[start:], SWAP_BLOCKS))
            for piece in pieces[: -(-(len(block_ids) - start) // PIECE)]:
                handle.append(piece)
                self._gathered.append((handle, len(handle) - 1))
        return handle

    def advance(self) -> None:
        """Send the next array to the host, if the one before has arrived."""
        while self._leaving and ((first := self._leaving[0]()) is None or first.is_ready()):  # type: ignore[attr-defined]
            self._leaving.popleft()
        if self._gathered and not self._leaving:
            self._take_one()

    def settle(self) -> None:
        """Send all to the host, and wait."""
        while self._gathered:
            self._take_one()
        while self._leaving:
            jax.block_until_ready(self._leaving.popleft()())

    def _take_one(self) -> None:
        if self._gathered:
            handle, index = self._gathered.popleft()
            if handle:  # its request did not end meanwhile
                handle[index] = jax.device_put(handle[index], self._on_host)
                self._leaving.append(ref(handle[index]))

    def fetch(self, handle: SwapHandle, arriving: list[Array]) -> bool:
        """Bring blocks back to the device, one array a call and as many as there is memory for beside the cache;
        returns whether they are there."""
        there = all(array.is_ready() for array in arriving)  # type: ignore[attr-defined]
        if there and len(arriving) < min(len(handle), IN_FLIGHT):
            arriving.append(jax.device_put(handle[len(arriving)], self._on_device))
            return False
        return there

    def swap_in(
        self, cache: KVCache, handle: SwapHandle, block_ids: Sequence[int], arriving: list[Array] | None = None
    ) -> KVCache:
        """Begins to put blocks into those of these numbers; the cache is donated. What was fetched, which this empties,
        need not be copied any more."""
        arriving = [] if arriving is None else arriving
        under_way = 0
        for start, size in _programs(len(handle) * PIECE):
            count = size // PIECE
            if under_way + count > IN_FLIGHT:
                jax.block_until_ready(cache)
                under_way = 0
            under_way += count
            pieces, arriving[:count] = arriving[:count], []
            first = start // PIECE
            left = handle[first + len(pieces) : first + count]
            pieces += [jax.device_put(piece, self._on_device) for piece in left]
            pieces += pieces[-1:] * (count - len(pieces))  # of which no block goes anywhere
            cache = self._scatters[size](cache, self._padded(block_ids[start:], size), tuple(pieces))
            del pieces
        return cache

    def warm_up(self, cache: KVCache) -> KVCache:
        """Pins all of the host memory, which takes long the first time, and measures a program's way there and back.
        The cache's content stays: block 0 goes, and comes back nowhere."""
        everything = self.swap_out(cache, [0] * self.num_blocks)
        self.settle()
        del everything
        for _ in range(3):
            start = time.monotonic()
            handle = self.swap_out(cache, [0] * SWAP_BLOCKS)
            self.settle()
            cache = jax.block_until_ready(self.swap_in(cache, handle, []))
            self.seconds_per_program = time.monotonic() - start
            large = SCATTERS[0]
            pieces = (jax.device_put(handle[0], self._on_device),) * (large // PIECE)
            cache = jax.block_until_ready(self._scatters[large](cache, self._padded([], large), pieces))
        logger.info(
            "swap space for %d blocks; %d of them to the host and back take %.1f ms",
            self.num_blocks,
            SWAP_BLOCKS,
            1000 * self.seconds_per_program,
        )
        return cache

    def _padded(self, block_ids: Sequence[int], size: int) -> np.ndarray:
        """The first ``size`` of them, or fewer and what is beyond the cache: a gather reads its last block there, and a
        scatter drops what would go there."""
        ids = np.full(size, self._cache_blocks, np.int32)
        ids[: len(block_ids)] = block_ids[:size]
        return ids


def _programs(count: int) -> Iterator[tuple[int, int]]:
    """Where each program's blocks begin, and how many it has, for ``count`` blocks and less than SWAP_BLOCKS beyond."""
    start = 0
    while start < count:
        size = next((size for size in SCATTERS if start + size <= count), SWAP_BLOCKS)
        yield start, size
        start += size


def _gather(cache: KVCache, ids: Array) -> list[Array]:
    def piece(ids: Array) -> Array:
        return jnp.stack([jnp.stack([keys[ids], values[ids]]) for keys, values in cache])

    return [piece(ids[start : start + PIECE]) for start in range(0, len(ids), PIECE)]


def _scatter(cache: KVCache, ids: Array, pieces: Sequence[Array]) -> KVCache:
    def put(array: Array, layer: int, kind: int) -> Array:
        return array.at[ids].set(jnp.concatenate([piece[layer, kind] for piece in pieces]), mode="drop")

    return tuple((put(keys, layer, 0), put(values, layer, 1)) for layer, (keys, values) in enumerate(cache))
