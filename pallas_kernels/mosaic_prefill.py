"""Prefill attention on Hopper's tensor cores through Pallas' Mosaic GPU backend: ragged chunks over block tables.

After FlashAttention 3 (Shah et al., arXiv:2407.08608). A thread block stays on its multiprocessor and works through a
list of items, each 128 queries of one sequence and head. The four warps of one warpgroup bring keys and values into
shared memory, a block of the cache a copy of the tensor memory accelerator; two other warpgroups take 64 queries each
and turns on the tensor cores. In a turn a warpgroup queues the scores of a step of keys and, behind them, the last
step's weights times its values; its softmax runs beside the latter and the other one's turn. Items are dealt longest
first and in serpentine order, which evens out causal work.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kept import kept
from pallas_kernels.mosaic_items import ALIGNED, WARPGROUPS, plan_items
from pallas_kernels.mosaic_kernel import Kernel, Tuning

Array = jax.Array

jax.config.update("jax_export_ignore_forward_compatibility", True)  # what is kept is for this version of jax alone

TUNING = Tuning()


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
    operands = q, k_cache, v_cache, block_tables, seq_lens, query_start_loc
    if interpret is not None:
        return _attend(*operands, scale=scale, window=window, tuning=tuning, interpret=interpret)
    types = tuple((a.shape, str(a.dtype)) for a in operands)
    result: Array = _exported(types, scale, window, tuning).call(*operands)
    return result


@cache
def _exported(
    types: tuple[tuple[tuple[int, ...], str], ...], scale: float, window: int | None, tuning: Tuning
) -> export.Exported:
    """The kernel for operands of these shapes, from an earlier process if there was one: to write it down in Mosaic's
    dialect takes a second, in each of the programs for so many shapes."""
    sources = sorted(Path(__file__).parent.glob("mosaic_*.py"))

    def make() -> bytes:
        run = jax.jit(partial(_attend, scale=scale, window=window, tuning=tuning))
        checks = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
        return bytes(export.export(run, platforms=["cuda"], disabled_checks=checks)(*shapes).serialize())

    key = (jax.__version__, types, scale, window, tuning)
    return export.deserialize(bytearray(kept("mosaic_prefill", key, sources, make)))


@partial(jax.jit, static_argnames=("scale", "window", "tuning", "interpret"))
def _attend(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float,
    window: int | None,
    tuning: Tuning,
    interpret: Any = None,
) -> Array:
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
