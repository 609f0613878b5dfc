"""The pieces that Llama-like models are made of."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxserve.models.config import RopeConfig

Array = jax.Array


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    contract: int = 1,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
) -> Array:
    """The last ``contract`` axes of ``x`` against the first of ``weight`` (``transposed``: the last of ``[out, in]``);
    every matmul of a model is one of these. ``dtype``: what it is accumulated in and given as, if not x's."""
    # Not weight.T: a CPU would make the transposed copy, at every step.
    axes = ((x.ndim - 1,), (1,)) if transposed else contract
    y = jnp.tensordot(x, weight, axes=axes, preferred_element_type=dtype)
    return y if bias is None else y + bias


# For a matmul of few rows without bias there may be a kernel of our own. Whether it takes the shapes is asked here; if
# not, the matmul is XLA's.


def linear_parts(x: Array, weight: Array, bias: Array | None = None, *, contract: int = 1, backend: str) -> Array:
    """``linear`` of ``x[T, ...]``, left as partial sums ``[P, T, ...]`` for ``add_rms_norm`` and ``rope_and_write``."""
    rows, outer = x.shape[0], weight.shape[contract:]
    depth, columns = math.prod(weight.shape[:contract]), math.prod(outer)
    if bias is None and pallas_kernels.suits_linear("parts", rows, depth, columns, x.dtype, backend=backend):
        flat = x.reshape(rows, depth), weight.reshape(depth, columns)
        return pallas_kernels.linear_parts(*flat, backend=backend).reshape(-1, rows, *outer)
    return linear(x, weight, bias, contract=contract)[None]


def gated_linear(x: Array, weight: Array, bias: Array | None = None, *, backend: str, swiglu_backend: str) -> Array:
    """SwiGLU of ``x[T, D]`` by gate and up ``weight[D, 2, I]``: ``[T, I]``."""
    depth, _, columns = weight.shape
    if bias is None and pallas_kernels.suits_linear("gated", x.shape[0], depth, columns, x.dtype, backend=backend):
        return pallas_kernels.gated_linear(x, weight, backend=backend)
    return pallas_kernels.swiglu(linear(x, weight, bias), backend=swiglu_backend)


def float32_linear(x: Array, weight: Array, *, backend: str) -> Array:
    """``x[T, D]`` by ``weight[D, V]``, in float32."""
    depth, columns = weight.shape
    if pallas_kernels.suits_linear("whole", x.shape[0], depth, columns, x.dtype, backend=backend):
        return pallas_kernels.linear(x, weight, dtype=jnp.float32, backend=backend)
    return linear(x, weight, dtype=jnp.float32)


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position of each rotary pair, float32 ``[D / 2]``."""
    inv_freq = 1.0 / config.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if config.kind == "linear":
        inv_freq = inv_freq / config.factor
    elif config.kind == "llama3":
        inv_freq = _llama3_frequencies(inv_freq, config)
    return inv_freq.astype(np.float32)


def _llama3_frequencies(inv_freq: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Llama 3.1's scaling: slow pairs are slowed by ``factor``, fast ones kept, those between blended."""
    original = config.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)  # 0: slow, 1: fast
    return (1 - blend) * inv_freq / config.factor + blend * inv_freq


def rope_tables(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    """cos and sin, float32 ``[T, D / 2]``, for ``positions[T]``."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)
