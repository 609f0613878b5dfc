"""Decode attention in Triton: split KV over a list of work items (``triton_decode_plan``).

A program takes one item, a stretch of a sequence's keys, and one KV head, whose query heads it packs into one tile, and
keeps an online softmax over it (Flash-Decoding, Dao et al. 2023). Where a sequence has several items, the program that
is last to finish combines their partial results, in the order of positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.decode_plan import DecodePlan
from pallas_kernels.triton_call import triton_call
from pallas_kernels.triton_decode_plan import ITEM, launch_plan, plan_kernel
from pallas_kernels.triton_softmax import LOG2E, accumulate

Array = jax.Array

COPIES = tl.constexpr(4)
"""Of a partial result's softmax sum: a thread loads it as it does four columns of the result, 16 bytes at once."""


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, items_ptr, k_scale_ptr, v_scale_ptr, counters_ptr, out_ptr, partial_ptr, lse_ptr,
    table_width,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, ROWS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Grid (max_items * K,). A sequence's only item gives ``out[S, K, G, D]``; others float32 partial results
    ``[max_items, K, G, D]``, with the log2 of their softmax sums in ``lse[max_items, K, G, COPIES]``. With ``KEEP``,
    what stands in ``out`` where a sequence is empty remains.
    ``counters[S, K]``, how many items of a sequence are done, are zero before and after."""
    item, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    number = tl.load(items_ptr)
    words = items_ptr + (1 + item) * ITEM
    seq, start, end, place = tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    first_place, count, length = tl.load(words + 4), tl.load(words + 5), tl.load(words + 6)
    mine = item < number
    if KEEP:
        mine &= length > 0
    if mine:
        group, dim, tile = tl.arange(0, ROWS_PAD), tl.arange(0, DIM_PAD), tl.arange(0, TILE)
        rows_seen = (group < GROUPS)[:, None] & (dim < DIM)[None, :]
        in_row = group[:, None] * DIM + dim[None, :]
        row = seq * KV_HEADS + head
        q = tl.load(q_ptr + row * GROUPS * DIM + in_row, mask=rows_seen, other=0.0)
        table = tables_ptr + seq.to(tl.int64) * table_width
        # Blocks are looked up a tile ahead, so that the copies of keys and values do not wait for them.
        next_block = tl.load(table + (start + tile) // BLOCK_SIZE, mask=start + tile < end, other=0)
        peak = tl.full([ROWS_PAD], float("-inf"), tl.float32)
        total = tl.zeros([ROWS_PAD], tl.float32)
        acc = tl.zeros([ROWS_PAD, DIM_PAD], tl.float32)
        for at in range(start, end, TILE):
            position, block = at + tile, next_block
            ahead = position + TILE
            next_block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
            seen = position < end
            if WINDOW > 0:
                seen &= position >= length - WINDOW
            offsets = (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + head
            offsets = offsets[:, None] * DIM + dim[None, :]
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
        _store(
            acc, peak, total, rows_seen, row, head, place, first_place, count,
            counters_ptr, out_ptr, partial_ptr, lse_ptr, KV_HEADS, GROUPS, GROUPS_PAD, ROWS_PAD, DIM, DIM_PAD, PARTS,
        )  # fmt: skip


@triton.jit
def _store(
    result, peak, total, rows_seen, row, head, place, first_place, count, counters_ptr, out_ptr, partial_ptr, lse_ptr,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, ROWS_PAD: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Where an item's result goes; the last item of several combines them."""
    group, dim = tl.arange(0, ROWS_PAD), tl.arange(0, DIM_PAD)
    in_row = group[:, None] * DIM + dim[None, :]
    out = out_ptr + row * GROUPS * DIM
    if count == 1:
        tl.store(out + in_row, result.to(out_ptr.dtype.element_ty), mask=rows_seen)
    else:
        part = (place * KV_HEADS + head) * GROUPS
        tl.store(partial_ptr + part * DIM + in_row, result, mask=rows_seen)
        copies = (part + group)[:, None] * COPIES + tl.arange(0, COPIES)[None, :]
        tl.store(lse_ptr + copies, (peak + tl.log2(total))[:, None], mask=(group < GROUPS)[:, None])
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == count - 1:
            tl.store(counters_ptr + row, 0)
            _combine(
                partial_ptr, lse_ptr, out, first_place * KV_HEADS + head, count,
                KV_HEADS, GROUPS, GROUPS_PAD, DIM, DIM_PAD, PARTS,
            )  # fmt: skip


@triton.jit
def _combine(
    partial_ptr, lse_ptr, out, first, count,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The mean of partial results ``first + KV_HEADS * i``, i < count, weighted by the sums of their softmax.

    A thread computes the weights of its own columns, whoever else needs the same ones: nothing waits at a barrier, and
    all loads of an iteration are under way at once.
    """
    COLUMNS: tl.constexpr = GROUPS_PAD * DIM_PAD
    part, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    group, dim = column // DIM_PAD, column % DIM_PAD
    mine = (group < GROUPS) & (dim < DIM)
    peak = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, count, PARTS):
        row = (first + (at + part) * KV_HEADS)[:, None] * GROUPS + group[None, :]
        there = (at + part < count)[:, None] & mine[None, :]
        values = tl.load(partial_ptr + row * DIM + dim[None, :], mask=there, other=0.0)
        lse = tl.load(lse_ptr + row * COPIES + (column % COPIES)[None, :], mask=there, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - base[None, :])
        keep = tl.exp2(peak - base)
        total = total * keep + tl.sum(weights, 0)
        acc = acc * keep + tl.sum(values * weights, 0)
        peak = new_peak
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + group * DIM + dim, result.to(out.dtype.element_ty), mask=mine)


@dataclass(frozen=True)
class Tuning:
    """How programs work; found by measuring on an H200, bfloat16."""

    tile: int
    """Keys a step of the loop."""
    num_warps: int
    num_stages: int
    programs: int
    """About as many as run at once."""


FEW_ROWS = Tuning(tile=64, num_warps=8, num_stages=3, programs=264)
"""Few programs: latency counts, and every further item is a partial result to wait for."""
MORE_ROWS = Tuning(tile=32, num_warps=2, num_stages=4, programs=528)
"""A program for every sequence and head, small enough that all of them run at once."""
MANY_ROWS = Tuning(tile=64, num_warps=4, num_stages=3, programs=396)
"""Several waves of programs, each of which streams."""
WIDE_TILE = 32
"""For float32 operands, multiplied at full precision: twice the bytes, and no room for more stages."""


def choose_tuning(num_seqs: int, split_size: int | None) -> Tuning:
    """With a fixed ``split_size``, the order in which a row is summed up must not depend on the number of rows."""
    if split_size or num_seqs > 64:
        return MANY_ROWS
    return FEW_ROWS if num_seqs <= 32 else MORE_ROWS


@dataclass(frozen=True)
class DecodeLaunch:
    """Parameters of the attention kernel's launch."""

    grid: tuple[int]
    parameters: dict[str, Any]
    num_warps: int
    num_stages: int
    partial_shape: tuple[int, int, int, int]  # [max_items, K, G, D]


def launch_decode(
    q_shape: tuple[int, ...], cache_shape: tuple[int, ...], table_width: int, max_items: int, tuning: Tuning, *,
    scale: float, window: int | None, scaled: bool, wide: bool, keep: bool = False,
) -> DecodeLaunch:  # fmt: skip
    _, heads, dim = q_shape
    _, block_size, kv_heads, _ = cache_shape
    groups, dim_pad = heads // kv_heads, triton.next_power_of_2(dim)
    groups_pad = triton.next_power_of_2(groups)
    warps, stages = (4, 2) if wide else (tuning.num_warps, tuning.num_stages)
    # Partial results that are loaded at once: 64 values a thread, 16 results at most.
    parts = max(1, min(16, 64 * 32 * warps // (groups_pad * dim_pad)))
    parameters = dict(
        table_width=table_width, SCALE=scale * LOG2E, WINDOW=window or 0, SCALED=scaled, KV_HEADS=kv_heads,
        GROUPS=groups, GROUPS_PAD=groups_pad, ROWS_PAD=max(16, groups_pad), DIM=dim, DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size, TILE=WIDE_TILE if wide else tuning.tile, PARTS=parts,
        PRECISION="ieee" if wide else "tf32", KEEP=keep,
    )  # fmt: skip
    return DecodeLaunch((max_items * kv_heads,), parameters, warps, stages, (max_items, kv_heads, groups, dim))


def plan_decode(
    seq_lens: Array, *, kv_heads: int, max_seq_len: int, window: int | None, split_size: int | None
) -> DecodePlan:
    programs = choose_tuning(seq_lens.shape[0], split_size).programs
    return plan_items(seq_lens, programs, kv_heads, max_seq_len, window, split_size)


def plan_items(
    seq_lens: Array, programs: int, kv_heads: int, max_seq_len: int, window: int | None, split_size: int | None
) -> DecodePlan:
    """A plan for about so many programs."""
    launch = launch_plan(
        seq_lens.shape[0], kv_heads=kv_heads, programs=programs, max_seq_len=max_seq_len, window=window,
        split_size=split_size,
    )  # fmt: skip
    items, counters = triton_call(
        seq_lens, kernel=plan_kernel, grid=(1,), num_warps=8,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (launch.items_shape, (launch.num_counters,))],
        **launch.parameters,
    )  # fmt: skip
    return DecodePlan((items, counters), window, split_size)


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    plan: DecodePlan,
    *,
    scale: float,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    into: Array | None = None,
) -> tuple[Array, DecodePlan]:
    items, counters = plan.arrays
    num_seqs, table_width = block_tables.shape
    launch = launch_decode(
        q.shape, k_cache.shape, table_width, items.shape[0] - 1, choose_tuning(num_seqs, plan.split_size),
        scale=scale, window=plan.window, scaled=k_scale is not None, wide=q.dtype == jnp.float32, keep=into is not None,
    )  # fmt: skip
    ones = jnp.ones((), jnp.float32)
    scales = (ones if k_scale is None else k_scale, ones if v_scale is None else v_scale)
    attended, counters = run_kernel(
        (q, k_cache, v_cache, block_tables, items, *scales), counters, into, launch.partial_shape, kernel=decode_kernel,
        grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages, **launch.parameters,
    )  # fmt: skip
    return attended, DecodePlan((items, counters), plan.window, plan.split_size)


def run_kernel(
    operands: tuple[Array, ...],
    counters: Array,
    into: Array | None,
    partial_shape: tuple[int, int, int, int],
    **launch: Any,
) -> tuple[Array, Array]:
    """Attention of the first operand, put ``into`` an array if there is one, and the counters; ``partial_shape`` is
    that of the partial results."""
    done, out = jax.new_ref(counters), [] if into is None else [jax.new_ref(into)]
    scratch = [
        jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        jax.ShapeDtypeStruct((*partial_shape[:3], COPIES.value), jnp.float32),
    ]
    fresh = [] if out else [jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)]
    results = triton_call(*operands, done, *out, out_type=[*fresh, *scratch], **launch)
    return jax.freeze(out[0]) if out else results[0], jax.freeze(done)
