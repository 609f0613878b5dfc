"""Prefill attention on Hopper's tensor cores through Pallas' Mosaic GPU backend: ragged chunks over block tables.

After FlashAttention 3 (Shah et al., arXiv:2407.08608). A thread block stays on its multiprocessor and works through a
list of items, each 128 queries of one sequence and head. The four warps of one warpgroup bring keys and values into
shared memory, a block of the cache a copy of the tensor memory accelerator; two other warpgroups take 64 queries each
and turns on the tensor cores: while one multiplies, the other computes its softmax. Items are dealt longest first and
in serpentine order, which evens out causal work.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_items import ALIGNED, WARPGROUPS, plan_items
from pallas_kernels.mosaic_kernel import Kernel, Tuning

Array = jax.Array

TUNING = Tuning()


@partial(jax.jit, static_argnames=("scale", "window", "tuning", "interpret"))
def prefill_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float,
    window: int | None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    tuning: Tuning = TUNING,
    interpret: Any = None,
) -> Array:
    """Raises ``ValueError`` for what this kernel cannot do: see ``refusal``."""
    reason = refusal(q.dtype, k_cache.dtype, q.shape[-1], k_cache.shape[1], tuning)
    if reason is None and (k_scale is not None or v_scale is not None):
        reason = "scales of keys and values"
    if reason is not None:
        raise ValueError(f"prefill attention on mosaic_gpu does not do {reason}")
    tokens, heads, dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    items, count = plan_items(tokens, seq_lens, query_start_loc, window, tuning.block_kv)
    run = Kernel(heads, kv_heads, dim, block_size, num_blocks, block_tables.shape[1], q.dtype, scale, window, tuning)
    padding = -tokens % ALIGNED
    call = plgpu.kernel(
        run,
        out_type=jax.ShapeDtypeStruct((tokens + padding, heads, dim), q.dtype),
        scratch_types=run.scratch(),
        grid=(tuning.thread_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="prefill_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    flat = (num_blocks * block_size, kv_heads, dim)
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0))) if padding else q
    out = call(q, k_cache.reshape(flat), v_cache.reshape(flat), block_tables, items, count)
    return out[:tokens] if padding else out


def refusal(dtype: Any, cache_dtype: Any, dim: int, block_size: int, tuning: Tuning = TUNING) -> str | None:
    """What of these the kernel does not do."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)) or dtype != cache_dtype:
        return f"{jnp.dtype(dtype).name} over a cache of {jnp.dtype(cache_dtype).name}"
    if dim not in (64, 128):
        return f"head size {dim}"
    if block_size % ALIGNED or tuning.block_kv % min(block_size, tuning.block_kv):
        return f"block size {block_size}"
    return None
