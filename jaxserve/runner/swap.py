"""KV blocks to pinned host memory and back, in two programs of ``SWAP_BLOCKS`` blocks each.

A gather collects blocks in one array on the device, whose way to the host, and later back, is a plain copy beside the
programs of later steps; a scatter puts them into the cache. Order is kept by the arrays alone: the gather reads the
cache as the steps submitted before leave it, and whatever is submitted afterwards may overwrite the blocks.
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
"""Blocks in host memory, SWAP_BLOCKS an array ``[layers, 2, SWAP_BLOCKS, B, K, D]``; dropping it frees them."""

Arriving = Sequence[Array]
"""The first arrays of a handle on their way to the device."""

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
        self._leaving: deque[ref[Array]] = deque()
        """What is on its way to the host; whoever ended meanwhile does not wait for it."""

    def swap_out(self, cache: KVCache, block_ids: Sequence[int]) -> SwapHandle:
        """Begins to copy these blocks to the host."""
        handle: SwapHandle = []
        for start in range(0, len(block_ids), SWAP_BLOCKS):
            if len(self._leaving) == IN_FLIGHT:
                jax.block_until_ready(self._leaving.popleft()())
            gathered = self._gather(cache, self._padded(block_ids[start : start + SWAP_BLOCKS]))
            handle.append(jax.device_put(gathered, self._on_host))
            self._leaving.append(ref(handle[-1]))
        return handle

    def fetch(self, handle: SwapHandle) -> Arriving:
        """Begins to copy blocks back to the device, as many as there is memory for beside the cache."""
        return [jax.device_put(blocks, self._on_device) for blocks in handle[:IN_FLIGHT]]

    def swap_in(self, cache: KVCache, handle: SwapHandle, block_ids: Sequence[int], arriving: Arriving = ()) -> KVCache:
        """Begins to put them into blocks of these numbers; the cache is donated."""
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
        jax.block_until_ready(everything)
        del everything
        for _ in range(3):
            start = time.monotonic()
            handle = jax.block_until_ready(self.swap_out(cache, [0]))
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
