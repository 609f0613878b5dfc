"""The paged KV cache: one pair of ``[N, B, K, D]`` arrays a layer, allocated once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.models.config import ModelConfig

KVCache = tuple[tuple[jax.Array, jax.Array], ...]
CACHE_SPEC = P(None, None, "tp", None)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: np.dtype) -> int:
    """Bytes of one block in all layers, keys and values."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def cache_shapes(config: ModelConfig, num_blocks: int, block_size: int, dtype: np.dtype, mesh: Mesh) -> KVCache:
    """The cache's shapes and shardings, without memory behind them: what programs are compiled from."""
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, CACHE_SPEC))
    return tuple((array, array) for _ in range(config.num_layers))  # type: ignore[misc]


def zeros[T](shapes: T) -> T:
    """Zeros on the device, of the shapes, dtypes and shardings of a tree."""
    result: T = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
    return result
