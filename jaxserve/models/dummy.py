"""Random parameters from a configuration alone (``--load-format dummy``): for measuring without a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import model_module


def param_structs(config: ModelConfig, dtype: np.dtype, mesh: Mesh) -> Any:
    """Shape, dtype and sharding of every parameter, without memory behind them."""
    module = model_module(config.architecture)

    def struct(path: tuple[Any, ...], shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        spec = module.SPECS.get(path[-1].key, P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = module.param_shapes(config)
    return jax.tree_util.tree_map_with_path(struct, shapes, is_leaf=lambda x: isinstance(x, tuple) and _is_shape(x))


def random_params(config: ModelConfig, dtype: np.dtype, mesh: Mesh, seed: int = 0) -> Any:
    """Normal random numbers, small enough that activations stay finite; norms are ones."""

    @partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
        values = jax.random.normal(key, struct.shape, struct.dtype) * jnp.asarray(struct.shape[0] ** -0.5, struct.dtype)
        return jax.lax.with_sharding_constraint(values, struct.sharding)

    structs = param_structs(config, dtype, mesh)
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(structs))))

    def make(path: tuple[Any, ...], struct: jax.ShapeDtypeStruct) -> jax.Array:
        key = next(keys)
        if "norm" in path[-1].key:
            return jnp.ones(struct.shape, struct.dtype, device=struct.sharding)
        return draw(key, struct)

    return jax.tree_util.tree_map_with_path(make, structs)


def _is_shape(value: tuple[Any, ...]) -> bool:
    return all(isinstance(n, int) for n in value)
