"""Decode attention in Triton over a work list: items of about equal size, whatever the lengths in the batch.

``plan_kernel`` cuts the sequences into stretches of keys, once a step. A program of ``decode_kernel`` takes one stretch
and the heads of one group, keeps an online softmax over it (Flash-Decoding, Dao et al. 2023), and the program that is
last to finish a sequence combines the partial results in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from pallas_kernels.triton_softmax import LOG2E, accumulate

ITEM = tl.constexpr(8)
"""Words of an item: sequence, first and last + 1 position, its slot among partial results, the sequence's first slot
and how many it has, the sequence's length; one word is free."""


OTHERS = tl.constexpr(16)
"""Sequences that a sequence is compared with at a time, to find its rank."""


@triton.jit
def _put(items_ptr, index, seq, start, end, slot, first_slot, count, length, mask):
    row = items_ptr + (1 + index) * ITEM
    tl.store(row, seq, mask=mask)
    tl.store(row + 1, start, mask=mask)
    tl.store(row + 2, end, mask=mask)
    tl.store(row + 3, slot, mask=mask)
    tl.store(row + 4, first_slot, mask=mask)
    tl.store(row + 5, count, mask=mask)
    tl.store(row + 6, length, mask=mask)


@triton.jit
def _cut(length, size, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """The first position that is read, how many whole stretches precede the last one, and how long that is."""
    first = tl.zeros_like(length)
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // ALIGN * ALIGN
    whole = tl.maximum(tl.cdiv(length - first, size) - 1, 0)
    return first, whole, length - first - whole * size


@triton.jit
def plan_kernel(
    lens_ptr, items_ptr, counters_ptr, num_seqs, max_items, counters, least, steps,
    SEQS_PAD: tl.constexpr, COUNTERS_PAD: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (1,). Stretches are as short as ``max_items`` allows, a multiple of ALIGN; whole ones come first, then the
    rests of the sequences, longest first. The first row of ``items[1 + max_items]`` counts them."""
    seq = tl.arange(0, SEQS_PAD)
    there = seq < num_seqs
    length = tl.load(lens_ptr + seq, mask=there, other=0)
    size = SPLIT_SIZE
    if SPLIT_SIZE == 0:
        low = tl.cdiv(least, ALIGN)
        high = tl.maximum(tl.cdiv(tl.max(length, 0), ALIGN), low)
        for _ in range(steps):
            middle = (low + high) // 2
            needed = tl.sum(_cut(length, middle * ALIGN, WINDOW, ALIGN)[1], 0) + num_seqs
            low = tl.where((needed > max_items) & (low < high), middle + 1, low)
            high = tl.where(needed > max_items, high, middle)
        size = high * ALIGN
    first, whole, rest = _cut(length, size, WINDOW, ALIGN)
    count = tl.where(there, whole + 1, 0)
    slots = tl.cumsum(count, 0) - count
    places = tl.cumsum(whole, 0) - whole
    all_whole = tl.sum(whole, 0)
    for chunk in range(0, tl.cdiv(tl.max(whole, 0), CHUNK)):
        index = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        start = first[:, None] + index * size
        _put(
            items_ptr, places[:, None] + index, seq[:, None] + 0 * index, start, start + size, slots[:, None] + index,
            slots[:, None] + 0 * index, count[:, None] + 0 * index, length[:, None] + 0 * index,
            index < whole[:, None],
        )  # fmt: skip
    rank = tl.zeros_like(length)
    for at in range(0, num_seqs, OTHERS):
        other = at + tl.arange(0, OTHERS)
        other_length = tl.load(lens_ptr + other, mask=other < num_seqs, other=0)
        other_rest = _cut(other_length, size, WINDOW, ALIGN)[2]
        before = (other_rest[None, :] > rest[:, None]) | (
            (other_rest[None, :] == rest[:, None]) & (other[None, :] < seq[:, None])
        )
        rank += tl.sum((before & (other < num_seqs)[None, :]).to(tl.int32), 1)
    start = first + whole * size
    _put(items_ptr, all_whole + rank, seq, start, length, slots + whole, slots, count, length, there)
    tl.store(items_ptr, all_whole + num_seqs)
    counter = tl.arange(0, COUNTERS_PAD)
    tl.store(counters_ptr + counter, tl.zeros_like(counter), mask=counter < counters)


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, items_ptr, k_scale_ptr, v_scale_ptr, out_ptr, partial_ptr, lse_ptr, counters_ptr,
    table_width,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS_PAD: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    PREFETCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (max_items * K / HEADS,). A program attends with the queries of HEADS KV heads: their keys at a position lie
    together, and scores of a query with another head's key are masked. FEW: the rows that hold queries, padded to a
    power of two."""
    LANES: tl.constexpr = KV_HEADS // HEADS
    ROWS: tl.constexpr = HEADS * GROUPS
    item, lane = tl.program_id(0) // LANES, tl.program_id(0) % LANES
    number = tl.load(items_ptr)
    row = items_ptr + (1 + item) * ITEM
    seq, start, end, slot = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    first_slot, count, length = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    if item < number:
        line, dim, tile = tl.arange(0, ROWS_PAD), tl.arange(0, DIM_PAD), tl.arange(0, TILE)
        first_row = (seq * LANES + lane) * ROWS
        mine = (line < ROWS)[:, None] & (dim < DIM)[None, :]
        q = tl.load(q_ptr + (first_row + line)[:, None] * DIM + dim[None, :], mask=mine, other=0.0)
        table = tables_ptr + seq.to(tl.int64) * table_width
        ahead = start + tile // HEADS
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        peak = tl.full([ROWS_PAD], float("-inf"), tl.float32)
        total = tl.zeros([ROWS_PAD], tl.float32)
        acc = tl.zeros([ROWS_PAD, DIM_PAD], tl.float32)
        for at in range(start, end, TILE // HEADS):
            position = at + tile // HEADS
            seen = position < end
            if PREFETCH:
                here = block
                ahead = position + TILE // HEADS
                block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
            else:
                here = tl.load(table + position // BLOCK_SIZE, mask=seen, other=0)
            place = (here.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + lane * HEADS + tile % HEADS
            offsets = place[:, None] * DIM + dim[None, :]
            if WINDOW > 0:
                seen &= position >= length - WINDOW
            loaded = seen[:, None] & (dim < DIM)[None, :]
            # Zeros beyond the sequence: what stands there may be a broken request's NaN.
            k = tl.load(k_ptr + offsets, mask=loaded, other=0.0)
            v = tl.load(v_ptr + offsets, mask=loaded, other=0.0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * SCALE
            if SCALED:  # HEADS == 1
                scores *= tl.load(k_scale_ptr + lane)
            visible = seen[None, :]
            if HEADS > 1:
                visible = visible & ((line // GROUPS)[:, None] == (tile % HEADS)[None, :])
            scores = tl.where(visible, scores, float("-inf"))
            acc, peak, total = accumulate(scores, v.to(q.dtype), acc, peak, total, PRECISION)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if SCALED:
            acc *= tl.load(v_scale_ptr + lane)
        out = out_ptr + first_row * DIM
        if count == 1:
            tl.store(out + line[:, None] * DIM + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=mine)
        else:
            part = (slot * LANES + lane) * ROWS + line
            tl.store(partial_ptr + part[:, None] * DIM + dim[None, :], acc, mask=mine)
            tl.store(lse_ptr + part, peak + tl.log2(total), mask=line < ROWS)
            tl.debug_barrier()  # all threads have stored before one says so
            counter = counters_ptr + seq * LANES + lane
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.store(counter, 0)
                _combine(
                    partial_ptr, lse_ptr, out, first_slot * LANES + lane, count,
                    LANES, ROWS, FEW, DIM, DIM_PAD, PARTS,
                )  # fmt: skip


@triton.jit
def _combine(
    partial_ptr, lse_ptr, out, first, count,
    LANES: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The mean of partial results ``first + LANES * i``, i < count, weighted by the sums of their softmax."""
    part, line, dim = tl.arange(0, PARTS), tl.arange(0, FEW), tl.arange(0, DIM_PAD)
    peak = tl.full([FEW], float("-inf"), tl.float32)
    total = tl.zeros([FEW], tl.float32)
    acc = tl.zeros([FEW, DIM_PAD], tl.float32)
    for at in range(0, count, PARTS):
        row = (first + (at + part) * LANES)[:, None] * ROWS + line[None, :]
        there = (at + part < count)[:, None] & (line < ROWS)[None, :]
        lse = tl.load(lse_ptr + row, mask=there, other=float("-inf"))
        values = tl.load(
            partial_ptr + row[:, :, None] * DIM + dim[None, None, :],
            mask=there[:, :, None] & (dim < DIM)[None, None, :], other=0.0,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - base[None, :])
        keep = tl.exp2(peak - base)
        total = total * keep + tl.sum(weights, 0)
        acc = acc * keep[:, None] + tl.sum(values * weights[:, :, None], 0)
        peak = new_peak
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = (line < ROWS)[:, None] & (dim < DIM)[None, :]
    tl.store(out + line[:, None] * DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Tuning:
    """How programs work; found by measuring (bench/decode_sweep.py)."""

    tile: int
    """Rows of keys a step of the loop."""
    heads: int
    """KV heads a program."""
    num_warps: int
    num_stages: int
    programs: int
    """About as many as run at once; few sequences are cut to reach it, of many only the longest are cut."""
    prefetch: bool = True
    least: int = 64
    """Positions that a stretch has at least."""


GRAIN = 16
"""Stretches are cut at multiples of this many positions."""


@dataclass(frozen=True)
class Plan:
    """Launch parameters, from shapes alone."""

    max_items: int
    plan: dict[str, Any]
    grid: tuple[int]
    decode: dict[str, Any]
    num_warps: int
    num_stages: int
    items_shape: tuple[int]
    counters_shape: tuple[int]
    partial_shape: tuple[int, int]


def make_plan(
    q_shape: tuple[int, ...], cache_shape: tuple[int, ...], table_width: int, tuning: Tuning, *,
    scale: float, window: int | None, split_size: int | None, scaled: bool, wide: bool,
) -> Plan:  # fmt: skip
    num_seqs, heads, dim = q_shape
    _, block_size, kv_heads, _ = cache_shape
    groups = heads // kv_heads
    lanes = kv_heads // tuning.heads
    rows = tuning.heads * groups
    few = triton.next_power_of_2(rows)
    longest = min(table_width * block_size, window + GRAIN if window else table_width * block_size)
    if split_size:
        max_items = num_seqs * (triton.cdiv(longest, split_size) + (1 if window else 0))
    else:
        wanted = tuning.programs // lanes
        max_items = min(max(wanted, num_seqs + wanted // 2), num_seqs * triton.cdiv(longest, tuning.least))
    seqs_pad = triton.next_power_of_2(num_seqs)
    counters = num_seqs * lanes
    plan = dict(
        num_seqs=num_seqs, max_items=max_items, counters=counters, least=tuning.least,
        steps=(longest // GRAIN).bit_length() + 1, SEQS_PAD=seqs_pad, COUNTERS_PAD=triton.next_power_of_2(counters),
        WINDOW=window or 0, ALIGN=split_size or GRAIN, SPLIT_SIZE=split_size or 0, CHUNK=max(1, 1024 // seqs_pad),
    )  # fmt: skip
    dim_pad = triton.next_power_of_2(dim)
    decode = dict(
        SCALE=scale * LOG2E, WINDOW=window or 0, SCALED=scaled, KV_HEADS=kv_heads, HEADS=tuning.heads, GROUPS=groups,
        ROWS_PAD=max(16, few), FEW=few, DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size,
        TILE=tuning.tile, PARTS=max(1, 32 * 32 * tuning.num_warps // (few * dim_pad)), PREFETCH=tuning.prefetch,
        PRECISION="ieee" if wide else "tf32",
    )  # fmt: skip
    return Plan(
        max_items=max_items, plan=plan, grid=(max_items * lanes,), decode=decode,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages, items_shape=(max_items * 8 + 8,),
        counters_shape=(counters,), partial_shape=(max_items * lanes * rows, dim),
    )  # fmt: skip
