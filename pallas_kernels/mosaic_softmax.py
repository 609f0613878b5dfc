"""The softmax of a warpgroup of ``mosaic_prefill``, a step of keys at a time, and the products around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_items import ROWS

Array = jax.Array
Ref = Any

LOG2E = 1.4426950408889634


class Softmax(NamedTuple):
    """Running state of an online softmax, ``[ROWS]`` each."""

    accumulator: Array
    """float32 ``[ROWS, D]``: what the weights of all steps but the last make of the values."""
    peak: Array
    """In units of log2."""
    total: Array
    weights: Array
    """``[ROWS, keys]``, of the last step."""

    @classmethod
    def start(cls, dim: int, keys: int, dtype: Any) -> Softmax:
        rows = plgpu.Layout.WGMMA.reduce(1)
        return cls(
            plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), rows),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), rows),
            plgpu.layout_cast(jnp.zeros((ROWS, keys), dtype), plgpu.Layout.WGMMA),
        )

    def scaled(self, keep: Array) -> Softmax:
        accumulator = self.accumulator * lax.broadcast_in_dim(keep, self.accumulator.shape, [0])
        return self._replace(accumulator=accumulator)

    def result(self) -> Array:
        total = jnp.where(self.total == 0.0, 1.0, self.total)
        return self.accumulator / lax.broadcast_in_dim(total, self.accumulator.shape, [0])


def hide(scores: Array, first_key: Array, position: Array, window: int | None) -> Array:
    """``scores[ROWS, keys]``, -inf where the query, from ``position`` on, does not see the key."""
    query = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA) + position
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + first_key
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return jnp.where(seen, scores, -jnp.inf)


def weigh(scores: Array, state: Softmax, scale: float, some_hidden: bool) -> tuple[Array, Array, Array, Array]:
    """The peak and total after a step, what becomes of what was before it, and the step's weights, float32.
    ``some_hidden``: a row may have seen nothing yet, and must not give inf - inf."""
    peak = jnp.maximum(state.peak, scores.max(axis=1) * (scale * LOG2E))
    base = jnp.where(peak == -jnp.inf, 0.0, peak) if some_hidden else peak
    keep = jnp.exp2(state.peak - base)
    weights = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(base, scores.shape, [0]))
    return peak, state.total * keep + weights.sum(axis=1), keep, weights


def multiply(state: Softmax, values: Ref, issued: Callable[[], None]) -> Softmax:
    """Adds the weights times ``values[keys, D]``. ``issued`` is called while the tensor cores are at it."""

    def run(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, state.weights, values)
        issued()

    return state._replace(accumulator=pl.run_state(run)(plgpu.ACC.init(state.accumulator)))


def multiply_and_weigh(
    state: Softmax,
    values: Ref,
    begin: Callable[[Ref], None],
    issued: Callable[[], None],
    weights_of: Callable[[Array], tuple[Array, Array, Array, Array]],
) -> tuple[Softmax, Array]:
    """The same, queued behind the product that gives the next step's scores, which ``begin`` begins. While it is
    computed, ``weights_of`` does with the scores what ``weigh`` does. Returns the state, its accumulator not yet
    scaled, and by what."""

    def run(refs: tuple[Ref, tuple[Ref, ...]]) -> None:
        accumulator, results = refs

        def inner(product: Ref) -> None:
            begin(product)
            plgpu.wgmma(accumulator, state.weights, values)
            issued()
            scores = plgpu.wgmma_accumulator_load(product, wait_n=1)
            for ref, value in zip(results, weights_of(scores), strict=True):
                ref[...] = value

        pl.run_scoped(inner, plgpu.ACC((ROWS, state.weights.shape[1]), jnp.float32))

    like = (state.peak, state.total, state.total, state.weights.astype(jnp.float32))
    accumulator, (peak, total, keep, weights) = pl.run_state(run)((plgpu.ACC.init(state.accumulator), like))
    # Rounded after the product: until then its weights' registers are in use, or it would have to be waited for.
    accumulator, weights = lax.optimization_barrier((accumulator, weights))
    return Softmax(accumulator, peak, total, weights.astype(state.weights.dtype)), keep
