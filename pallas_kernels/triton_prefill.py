"""Prefill attention in Triton: ragged chunks over block tables, causal (FlashAttention-2, Dao, arXiv:2307.08691)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.triton_call import triton_call
from pallas_kernels.triton_softmax import LOG2E, accumulate

Array = jax.Array

SEQS_PAD = 64
"""Sequences that a program looks through, at least."""


@triton.jit
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, starts_ptr, k_scale_ptr, v_scale_ptr, tokens, seqs, out_ptr,
    SCALE: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TABLE_WIDTH: tl.constexpr,
    SEQS_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, H): a tile is ROWS queries of one sequence; tiles left over write zeros to the tokens before the
    first sequence's and behind the last one's. ``tokens`` and ``seqs`` are known at run time only, so that programs of
    all sizes share a kernel."""
    index, head = tl.program_id(0), tl.program_id(1)
    row, dim, tile = tl.arange(0, ROWS), tl.arange(0, DIM_PAD), tl.arange(0, TILE)
    all_seqs = tl.arange(0, SEQS_PAD)
    begin = tl.load(starts_ptr + all_seqs, mask=all_seqs < seqs, other=0)
    finish = tl.load(starts_ptr + all_seqs + 1, mask=all_seqs < seqs, other=0)
    tiles = tl.where(all_seqs < seqs, tl.cdiv(finish - begin, ROWS), 0)
    seq = tl.sum((tl.cumsum(tiles, 0) <= index).to(tl.int32), 0)
    if seq >= seqs:
        left, leading = index - tl.sum(tiles, 0), tl.load(starts_ptr)
        behind = left - tl.cdiv(leading, ROWS)
        token = tl.where(behind < 0, left * ROWS, tl.load(starts_ptr + seqs) + behind * ROWS) + row
        nobodys = token < tl.where(behind < 0, leading, tokens)
        out = out_ptr + (token[:, None] * HEADS + head) * DIM + dim[None, :]
        zeros = tl.zeros([ROWS, DIM_PAD], out_ptr.dtype.element_ty)
        tl.store(out, zeros, mask=nobodys[:, None] & (dim < DIM)[None, :])
    else:
        before = tl.sum(tl.where(all_seqs < seq, tiles, 0), 0)
        first_token = tl.load(starts_ptr + seq)
        query_len = tl.load(starts_ptr + seq + 1) - first_token
        length = tl.load(lens_ptr + seq)
        offset = (index - before) * ROWS
        mine = (offset + row < query_len)[:, None] & (dim < DIM)[None, :]
        places = ((first_token + offset + row)[:, None] * HEADS + head) * DIM + dim[None, :]
        q = tl.load(q_ptr + places, mask=mine, other=0.0)
        position = length - query_len + offset + row
        end = tl.minimum(length - query_len + offset + ROWS, length)
        start = 0
        if WINDOW > 0:
            start = tl.maximum(length - query_len + offset - WINDOW + 1, 0) // TILE * TILE
        kv_head = head // (HEADS // KV_HEADS)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        for at in range(start, end, TILE):
            key_position = at + tile
            known = key_position < end
            if WINDOW > 0:
                known &= key_position > length - query_len + offset - WINDOW
            block = tl.load(tables_ptr + seq * TABLE_WIDTH + key_position // BLOCK_SIZE, mask=known, other=0)
            place = (block.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE) * KV_HEADS + kv_head
            offsets = place[:, None] * DIM + dim[None, :]
            loaded = known[:, None] & (dim < DIM)[None, :]
            k = tl.load(k_ptr + offsets, mask=loaded, other=0.0)
            v = tl.load(v_ptr + offsets, mask=loaded, other=0.0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * SCALE
            if SCALED:
                scores *= tl.load(k_scale_ptr + kv_head)
            seen = key_position[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= key_position[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
            acc, peak, total = accumulate(scores, v.to(q.dtype), acc, peak, total, PRECISION)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if SCALED:
            acc *= tl.load(v_scale_ptr + kv_head)
        tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mine)


def plan_prefill(
    q_shape: tuple[int, ...],
    cache_shape: tuple[int, ...],
    tables_shape: tuple[int, ...],
    *,
    scale: float,
    window: int | None,
    scaled: bool,
    wide: bool,
) -> tuple[tuple[int, int], dict[str, Any], dict[str, int]]:
    """Grid, static parameters, and launch options. ``wide``: float32 operands, at full precision in smaller tiles."""
    tokens, heads, dim = q_shape
    _, block_size, kv_heads, _ = cache_shape
    seqs, table_width = tables_shape
    rows, tile = (32, 32) if wide else (128 if tokens >= 1024 else 64, 64)
    parameters = dict(
        SCALE=scale * LOG2E, SCALED=scaled, WINDOW=window or 0, HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim), BLOCK_SIZE=block_size, TABLE_WIDTH=table_width,
        SEQS_PAD=max(SEQS_PAD, triton.next_power_of_2(seqs)), ROWS=rows, TILE=tile,
        PRECISION="ieee" if wide else "tf32",
    )  # fmt: skip
    # Each sequence may end with a tile that is not full, and so may the tokens before and behind them.
    grid = (triton.cdiv(tokens, rows) + seqs + 2, heads)
    return grid, parameters, {"num_warps": 8 if rows == 128 else 4, "num_stages": 2 if wide else 3}


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
) -> Array:
    wide = q.dtype == jnp.float32
    grid, parameters, options = plan_prefill(
        q.shape, k_cache.shape, block_tables.shape, scale=scale, window=window, scaled=k_scale is not None, wide=wide
    )
    ones = jnp.ones((), jnp.float32)
    return triton_call(
        q, k_cache, v_cache, block_tables, seq_lens, query_start_loc,
        ones if k_scale is None else k_scale, ones if v_scale is None else v_scale,
        q.shape[0], block_tables.shape[0],
        kernel=prefill_kernel, grid=grid, out_type=jax.ShapeDtypeStruct(q.shape, q.dtype), **options, **parameters,
    )  # fmt: skip
