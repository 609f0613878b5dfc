"""KV blocks to pinned host memory and back, in two programs of ``SWAP_BLOCKS`` blocks each.

A gather collects blocks in one array on the device, whose way to the host, and later back, is a plain copy beside the
programs of later steps; a scatter puts them into the cache. Order is kept by the arrays alone: the gather reads the
cache as the steps submitted before leave it, and whatever is submitted afterwards may overwrite the blocks. One array
at a time is on its way in either direction: a step's own few bytes go the same ways, and wait behind it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
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
"""Blocks in host memory, or gathered and still to go there, SWAP_BLOCKS an array ``[layers, 2, SWAP_BLOCKS, B, K, D]``.
Clearing it frees them."""

SWAP_BLOCKS = 64
IN_FLIGHT = 8
"""Programs whose blocks may lie on the device, each way, beside the cache: the memory for them is set aside."""
_SPEC = P(None, None, *CACHE_SPEC)


def reserved_bytes(block_bytes: int) -> int:
    """Device memory for blocks on their way, gathered and while they are being put together."""
    return (2 * IN_FLIGHT + 2) * SWAP_BLOCKS * block_bytes


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
        ids = jax.ShapeDtypeStruct((SWAP_BLOCKS,), np.int32, sharding=NamedSharding(mesh, P()))
        shape = (len(cache), 2, SWAP_BLOCKS, *cache[0][0].shape[1:])
        blocks = jax.ShapeDtypeStruct(shape, cache[0][0].dtype, sharding=self._on_device)
        gather: Callable[..., Array] = jax.jit(_gather, out_shardings=self._on_device)
        self._gather: Any = gather.lower(cache, ids).compile()  # type: ignore[attr-defined]
        self._scatter: Any = jax.jit(_scatter, donate_argnums=0).lower(cache, ids, blocks).compile()
        check_aliased(self._scatter, cache, "the program that swaps in")
        self._gathered: deque[tuple[SwapHandle, int]] = deque()
        """Arrays that are still to go to the host …"""
        self._leaving: deque[ref[Array]] = deque()
        """… and those on their way, the oldest first."""

    def swap_out(self, cache: KVCache, block_ids: Sequence[int]) -> SwapHandle:
        """Gathers these blocks; ``advance`` takes them to the host."""
        handle: SwapHandle = []
        for start in range(0, len(block_ids), SWAP_BLOCKS):
            while len(self._gathered) + len(self._leaving) >= IN_FLIGHT:
                self._take_one()
                if self._leaving:
                    jax.block_until_ready(self._leaving.popleft()())
            handle.append(self._gather(cache, self._padded(block_ids[start : start + SWAP_BLOCKS])))
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
        self, cache: KVCache, handle: SwapHandle, block_ids: Sequence[int], arriving: Sequence[Array] = ()
    ) -> KVCache:
        """Begins to put blocks into those of these numbers; the cache is donated. What was fetched need not be copied
        any more."""
        for index, blocks in enumerate(handle):
            if index >= max(IN_FLIGHT, len(arriving)):
                jax.block_until_ready(cache)
            on_device = arriving[index] if index < len(arriving) else jax.device_put(blocks, self._on_device)
            ids = self._padded(block_ids[index * SWAP_BLOCKS : (index + 1) * SWAP_BLOCKS])
            cache = self._scatter(cache, ids, on_device)
        return cache

    def warm_up(self, cache: KVCache) -> KVCache:
        """Pins all of the host memory, which takes long the first time, and measures a program's way there and back.
        The cache's content stays: block 0 goes, and comes back nowhere."""
        everything = self.swap_out(cache, [0] * self.num_blocks)
        self.settle()
        del everything
        for _ in range(3):
            start = time.monotonic()
            handle = self.swap_out(cache, [0])
            self.settle()
            cache = jax.block_until_ready(self.swap_in(cache, handle, []))
            self.seconds_per_program = time.monotonic() - start
        logger.info(
            "swap space for %d blocks; %d of them to the host and back take %.1f ms",
            self.num_blocks,
            SWAP_BLOCKS,
            1000 * self.seconds_per_program,
        )
        return cache

    def _padded(self, block_ids: Sequence[int]) -> np.ndarray:
        # Beyond the cache: a gather reads its last block there, and a scatter drops what would go there.
        ids = np.full(SWAP_BLOCKS, self._cache_blocks, np.int32)
        ids[: len(block_ids)] = block_ids
        return ids


def _gather(cache: KVCache, ids: Array) -> Array:
    return jnp.stack([jnp.stack([keys[ids], values[ids]]) for keys, values in cache])


def _scatter(cache: KVCache, ids: Array, blocks: Array) -> KVCache:
    return tuple(
        (keys.at[ids].set(layer[0], mode="drop"), values.at[ids].set(layer[1], mode="drop"))
        for (keys, values), layer in zip(cache, blocks, strict=True)
    )
