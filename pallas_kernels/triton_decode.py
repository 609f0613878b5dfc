"""Decode attention in Triton: split KV, the query heads of a KV head packed into one tile.

A program takes one sequence, one KV head and one stretch of its keys, and keeps an online softmax over it; where there
are several stretches a second kernel combines their partial results (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.triton_softmax import LOG2E, accumulate

Array = jax.Array

MAX_SPLITS = 128


@dataclass(frozen=True)
class Tuning:
    """How a program works; found by measuring (bench/kernels.py)."""

    tile: int
    num_warps: int
    num_stages: int
    programs: int = 132 * 4
    """About as many programs as keep a Hopper GPU's memory busy; fewer sequences are split to reach it."""


TUNING = Tuning(tile=64, num_warps=4, num_stages=3)
WIDE_TUNING = Tuning(tile=32, num_warps=4, num_stages=2)
"""For float32 operands, multiplied at full precision."""


@triton.jit
def _stretch(
    length, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """First and last + 1 position of a split. The stretches of a row depend on its own length (and window) alone."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    if SPLIT_SIZE > 0:
        first = first // SPLIT_SIZE * SPLIT_SIZE
        size = SPLIT_SIZE
    else:
        size = tl.maximum(tl.cdiv(tl.cdiv(length - first, SPLITS), TILE), 1) * TILE
    start = first + split * size
    return start, tl.minimum(start + size, length)


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TABLE_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (S, K, SPLITS). With one split ``out[S, K, G, D]`` is the result, else float32 partial results
    ``[S, K, SPLITS, G, D]`` with the log2 of their softmax sums in ``lse[S, K, SPLITS, G]``."""
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + seq)
    start, end = _stretch(length, split, WINDOW, SPLITS, SPLIT_SIZE, TILE)
    if SPLITS == 1 or start < end:
        group, dim, tile = tl.arange(0, GROUPS_PAD), tl.arange(0, DIM_PAD), tl.arange(0, TILE)
        row = seq * KV_HEADS + head
        rows_seen = (group < GROUPS)[:, None] & (dim < DIM)[None, :]
        q = tl.load(q_ptr + (row * GROUPS + group)[:, None] * DIM + dim[None, :], mask=rows_seen, other=0.0)
        peak = tl.full([GROUPS_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS_PAD], tl.float32)
        acc = tl.zeros([GROUPS_PAD, DIM_PAD], tl.float32)
        for at in range(start, end, TILE):
            position = at + tile
            seen = position < end
            if WINDOW > 0:
                seen &= position >= length - WINDOW
            block = tl.load(tables_ptr + seq * TABLE_WIDTH + position // BLOCK_SIZE, mask=seen, other=0)
            place = (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + head
            offsets = place[:, None] * DIM + dim[None, :]
            loaded = seen[:, None] & (dim < DIM)[None, :]
            # Zeros beyond the sequence: what stands there may be a broken request's NaN.
            k = tl.load(k_ptr + offsets, mask=loaded, other=0.0)
            v = tl.load(v_ptr + offsets, mask=loaded, other=0.0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * SCALE
            if SCALED:
                scores *= tl.load(k_scale_ptr + head)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            acc, peak, total = accumulate(scores, v.to(q.dtype), acc, peak, total, PRECISION)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if SCALED:
            acc *= tl.load(v_scale_ptr + head)
        out_row = (row * SPLITS + split) * GROUPS + group
        tl.store(out_ptr + out_row[:, None] * DIM + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=rows_seen)
        if SPLITS > 1:
            tl.store(lse_ptr + out_row, peak + tl.log2(total), mask=group < GROUPS)


@triton.jit
def combine_kernel(
    partial_ptr, lse_ptr, lens_ptr, out_ptr,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, SPLIT_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (S, K, G): the weighted mean of a head's partial results; splits that did not run are not read."""
    seq, head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split, dim = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    length = tl.load(lens_ptr + seq)
    start, end = _stretch(length, split, WINDOW, SPLITS, SPLIT_SIZE, TILE)
    ran = (split < SPLITS) & (start < end)
    row = ((seq * KV_HEADS + head) * SPLITS + split) * GROUPS + group
    lse = tl.load(lse_ptr + row, mask=ran, other=float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    parts = tl.load(
        partial_ptr + row[:, None] * DIM + dim[None, :], mask=ran[:, None] & (dim < DIM)[None, :], other=0.0
    )
    total = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + ((seq * KV_HEADS + head) * GROUPS + group) * DIM + dim
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dim < DIM)


@dataclass(frozen=True)
class DecodePlan:
    """Launch parameters, from shapes alone."""

    grid: tuple[int, int, int]
    decode: dict[str, Any]
    combine_grid: tuple[int, int, int]
    combine: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def splits(self) -> int:
        return self.grid[2]


def plan_decode(
    q_shape: tuple[int, ...],
    cache_shape: tuple[int, ...],
    table_width: int,
    *,
    scale: float,
    window: int | None,
    split_size: int | None,
    scaled: bool,
    wide: bool,
) -> DecodePlan:
    """``wide``: float32 operands, multiplied at full precision in smaller tiles. ``split_size`` fixes the length of a
    stretch (a multiple of 64), so that a row's order of summation does not depend on the batch's size either."""
    num_seqs, heads, dim = q_shape
    _, block_size, kv_heads, _ = cache_shape
    groups, tuning = heads // kv_heads, WIDE_TUNING if wide else TUNING
    tile = tuning.tile
    longest = min(table_width * block_size, window + tile if window else table_width * block_size)
    if split_size:
        splits = triton.cdiv(longest, split_size) + (1 if window else 0)
    else:
        wanted = triton.cdiv(tuning.programs, num_seqs * kv_heads)
        splits = max(1, min(wanted, triton.cdiv(longest, tile), MAX_SPLITS))
    shared = dict(
        WINDOW=window or 0, KV_HEADS=kv_heads, GROUPS=groups, DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
        SPLITS=splits, SPLIT_SIZE=split_size or 0, TILE=tile,
    )  # fmt: skip
    decode = dict(
        SCALE=scale * LOG2E, SCALED=scaled, GROUPS_PAD=max(16, triton.next_power_of_2(groups)), BLOCK_SIZE=block_size,
        TABLE_WIDTH=table_width, PRECISION="ieee" if wide else "tf32",
    )  # fmt: skip
    return DecodePlan(
        grid=(num_seqs, kv_heads, splits),
        decode={**shared, **decode},
        combine_grid=(num_seqs, kv_heads, groups),
        combine={**shared, "SPLITS_PAD": triton.next_power_of_2(splits)},
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float,
    window: int | None,
    split_size: int | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    import jax_triton

    plan = plan_decode(
        q.shape, k_cache.shape, block_tables.shape[1], scale=scale, window=window, split_size=split_size,
        scaled=k_scale is not None, wide=q.dtype == jnp.float32,
    )  # fmt: skip
    num_seqs, heads, dim = q.shape
    ones = jnp.ones((), jnp.float32)
    rows = (num_seqs, plan.grid[1], plan.splits, heads // plan.grid[1])
    partial_type = jnp.float32 if plan.splits > 1 else q.dtype
    partial, lse = jax_triton.triton_call(
        q, k_cache, v_cache, block_tables, seq_lens,
        ones if k_scale is None else k_scale, ones if v_scale is None else v_scale,
        kernel=decode_kernel, grid=plan.grid, num_warps=plan.num_warps, num_stages=plan.num_stages,
        out_type=[jax.ShapeDtypeStruct((*rows, dim), partial_type), jax.ShapeDtypeStruct(rows, jnp.float32)],
        **plan.decode,
    )  # fmt: skip
    if plan.splits == 1:
        return partial.reshape(q.shape)
    return jax_triton.triton_call(
        partial, lse, seq_lens, kernel=combine_kernel, grid=plan.combine_grid, num_warps=4,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype), **plan.combine,
    )  # fmt: skip
