"""Who does what in decode attention: sequences are cut into items of about equal size, once a step, on the device.

A batch's lengths are not known when a program is compiled, only how many rows it has; so the grid of the attention
kernel is fixed, and this kernel tells each of its programs which stretch of which sequence is its.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

ITEM = tl.constexpr(8)
"""Words of an item: sequence, first and last + 1 position, its place among the partial results, the place of the
sequence's first, how many it has, the sequence's length; one word is free. Before the first item stands one more, whose
first word counts them."""

GRAIN = 16
"""Sequences are cut at multiples of this many positions."""

LEAST = 64
"""Positions that an item has at least, but for the end of a sequence."""

OTHERS = tl.constexpr(16)
"""Sequences that a sequence is compared with at a time, to find its rank."""


@triton.jit
def _put(items_ptr, index, seq, start, end, place, first_place, count, length, mask):
    row = items_ptr + (1 + index) * ITEM
    tl.store(row, seq, mask=mask)
    tl.store(row + 1, start, mask=mask)
    tl.store(row + 2, end, mask=mask)
    tl.store(row + 3, place, mask=mask)
    tl.store(row + 4, first_place, mask=mask)
    tl.store(row + 5, count, mask=mask)
    tl.store(row + 6, length, mask=mask)


@triton.jit
def _cut(length, size, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """The first position that is read, how many whole items precede the last one, and how long that is."""
    first = tl.zeros_like(length)
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // ALIGN * ALIGN
    whole = tl.maximum(tl.cdiv(length - first, size) - 1, 0)
    return first, whole, length - first - whole * size


@triton.jit
def _item_size(length, num_seqs, max_items, least, steps, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """The smallest size, in positions, with which ``max_items`` suffice: by bisection."""
    low = tl.cdiv(least, ALIGN)
    read = length - _cut(length, ALIGN, WINDOW, ALIGN)[0]
    high = tl.maximum(tl.cdiv(tl.max(read, 0), ALIGN), low)
    for _ in range(steps):
        middle = (low + high) // 2
        needed = tl.sum(_cut(length, middle * ALIGN, WINDOW, ALIGN)[1], 0) + num_seqs
        low = tl.where((needed > max_items) & (low < high), middle + 1, low)
        high = tl.where(needed > max_items, high, middle)
    return high * ALIGN


@triton.jit
def _rank(rest, seq, lens_ptr, num_seqs, size, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Where each sequence stands among all by the length of its last item, the longest first."""
    rank = tl.zeros_like(rest)
    for at in range(0, num_seqs, OTHERS):
        other = at + tl.arange(0, OTHERS)
        length = tl.load(lens_ptr + other, mask=other < num_seqs, other=0)
        other_rest = _cut(length, size, WINDOW, ALIGN)[2]
        before = (other_rest[None, :] > rest[:, None]) | (
            (other_rest[None, :] == rest[:, None]) & (other[None, :] < seq[:, None])
        )
        rank += tl.sum((before & (other < num_seqs)[None, :]).to(tl.int32), 1)
    return rank


@triton.jit
def plan_kernel(
    lens_ptr, items_ptr, counters_ptr, num_seqs, max_items, num_counters, least, steps,
    SEQS_PAD: tl.constexpr, COUNTERS_PAD: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (1,). ``items[1 + max_items, ITEM]``, whole ones first, then the ends of the sequences, longest first, so
    that what begins last is short. Every sequence has an item, that of length 0 too: its output is to be zeros.
    Counters are set to zero."""
    seq = tl.arange(0, SEQS_PAD)
    there = seq < num_seqs
    length = tl.load(lens_ptr + seq, mask=there, other=0)
    size = SPLIT_SIZE
    if SPLIT_SIZE == 0:
        size = _item_size(length, num_seqs, max_items, least, steps, WINDOW, ALIGN)
    first, whole, rest = _cut(length, size, WINDOW, ALIGN)
    count = tl.where(there, whole + 1, 0)
    places = tl.cumsum(count, 0) - count
    before = tl.cumsum(whole, 0) - whole
    all_whole = tl.sum(whole, 0)
    for chunk in range(0, tl.cdiv(tl.max(whole, 0), CHUNK)):
        index = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        start = first[:, None] + index * size
        same = 0 * index
        _put(
            items_ptr, before[:, None] + index, seq[:, None] + same, start, start + size, places[:, None] + index,
            places[:, None] + same, count[:, None] + same, length[:, None] + same, index < whole[:, None],
        )  # fmt: skip
    rank = _rank(rest, seq, lens_ptr, num_seqs, size, WINDOW, ALIGN)
    start = first + whole * size
    _put(items_ptr, all_whole + rank, seq, start, length, places + whole, places, count, length, there)
    tl.store(items_ptr, all_whole + num_seqs)
    counter = tl.arange(0, COUNTERS_PAD)
    tl.store(counters_ptr + counter, tl.zeros_like(counter), mask=counter < num_counters)


@dataclass(frozen=True)
class PlanLaunch:
    """Shapes and parameters of the kernel's launch."""

    max_items: int
    num_counters: int
    parameters: dict[str, int]

    @property
    def items_shape(self) -> tuple[int, int]:
        return 1 + self.max_items, ITEM.value


def launch_plan(
    num_seqs: int, *, kv_heads: int, programs: int, max_seq_len: int, window: int | None, split_size: int | None
) -> PlanLaunch:
    """``programs``: about as many as a GPU runs at once. Few sequences are cut to reach it; of many, only the longest
    are cut, into half as many items more."""
    longest = min(max_seq_len, window + (split_size or GRAIN)) if window else max_seq_len
    if split_size:
        max_items = num_seqs * triton.cdiv(longest, split_size)
    else:
        wanted = programs // kv_heads
        max_items = min(max(wanted, num_seqs + wanted // 2), num_seqs * triton.cdiv(longest, LEAST))
    seqs_pad, num_counters = triton.next_power_of_2(num_seqs), num_seqs * kv_heads
    parameters = dict(
        num_seqs=num_seqs, max_items=max_items, num_counters=num_counters, least=LEAST,
        steps=triton.cdiv(longest, GRAIN).bit_length() + 1, SEQS_PAD=seqs_pad,
        COUNTERS_PAD=triton.next_power_of_2(num_counters), WINDOW=window or 0, ALIGN=split_size or GRAIN,
        SPLIT_SIZE=split_size or 0, CHUNK=max(1, 1024 // seqs_pad),
    )  # fmt: skip
    return PlanLaunch(max_items, num_counters, parameters)
