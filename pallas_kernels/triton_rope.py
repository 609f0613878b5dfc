"""Rotary embedding and KV write in one kernel: what would be five small ones in every layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.triton_call import triton_call
from pallas_kernels.triton_early import enter

Array = jax.Array


@triton.jit
def _load_sum(source, mask, part_size, dtype, PARTS: tl.constexpr):
    """The sum of ``PARTS`` partial results, rounded to ``dtype``; they are ``part_size`` elements apart."""
    total = tl.load(source, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(source + part * part_size, mask=mask, other=0.0)
    return total.to(dtype)


@triton.jit
def _rotate(source, target, cos, sin, mask, part_size, dtype, HALF: tl.constexpr, PARTS: tl.constexpr):
    """Turn pairs (i, i + HALF) of the rows that the pointers stand for, in float32."""
    first = _load_sum(source, mask, part_size, dtype, PARTS).to(tl.float32)
    second = _load_sum(source + HALF, mask, part_size, dtype, PARTS).to(tl.float32)
    tl.store(target, (first * cos - second * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(target.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, q_ptr,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, PARTS: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (T, K): the G query heads, the key and the value of one token and KV head. The caches are written in
    place. ``qkv`` is the sum of ``PARTS`` partial results ``[PARTS, T, K, G + 2, D]``, rounded to q's type."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, group = tl.arange(0, HALF_PAD), tl.arange(0, GROUPS_PAD)
    here = pair < HALF
    cos = tl.load(cos_ptr + token * HALF + pair, mask=here, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=here, other=0.0)
    place = (tl.load(slots_ptr + token).to(tl.int64) * KV_HEADS + head) * DIM
    if CHAINED:
        enter()
    row = qkv_ptr + (token * KV_HEADS + head) * (GROUPS + 2) * DIM
    part_size = tl.num_programs(0).to(tl.int64) * KV_HEADS * (GROUPS + 2) * DIM
    dtype = q_ptr.dtype.element_ty
    queries = group[:, None] * DIM + pair[None, :]
    target = q_ptr + (token * KV_HEADS + head) * GROUPS * DIM
    shown = (group < GROUPS)[:, None] & here[None, :]
    _rotate(row + queries, target + queries, cos[None, :], sin[None, :], shown, part_size, dtype, HALF, PARTS)
    _rotate(row + GROUPS * DIM + pair, k_cache_ptr + place + pair, cos, sin, here, part_size, dtype, HALF, PARTS)
    for half in tl.static_range(2):
        value = _load_sum(row + (GROUPS + 1) * DIM + half * HALF + pair, here, part_size, dtype, PARTS)
        tl.store(v_cache_ptr + place + half * HALF + pair, value.to(v_cache_ptr.dtype.element_ty), mask=here)


def plan_rope(qkv_shape: tuple[int, ...]) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and static parameters."""
    parts, tokens, kv_heads, lanes, dim = qkv_shape
    groups, half = lanes - 2, dim // 2
    parameters = dict(
        GROUPS=groups, GROUPS_PAD=triton.next_power_of_2(groups), KV_HEADS=kv_heads, DIM=dim,
        HALF=half, HALF_PAD=triton.next_power_of_2(half), PARTS=parts,
    )  # fmt: skip
    return (tokens, kv_heads), parameters


def rope_and_write(
    qkv: Array, cos: Array, sin: Array, k_cache: Array, v_cache: Array, slots: Array, *, dtype: jnp.dtype
) -> tuple[Array, Array, Array]:
    _, tokens, kv_heads, lanes, dim = qkv.shape
    grid, parameters = plan_rope(qkv.shape)
    keys, values = jax.new_ref(k_cache), jax.new_ref(v_cache)
    q: Array = triton_call(
        qkv, cos, sin, slots, keys, values, kernel=rope_kernel, grid=grid, num_warps=1,
        out_type=jax.ShapeDtypeStruct((tokens, kv_heads * (lanes - 2), dim), dtype), **parameters,
    )  # fmt: skip
    return q, jax.freeze(keys), jax.freeze(values)
