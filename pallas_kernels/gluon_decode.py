"""Decode attention on Hopper: ``triton_decode``'s work items and results, with fewer operations a byte.

Triton makes the queries of a KV head the rows of its products, 16 at least, and brings keys and values through
registers. Here keys and values are the rows, which the tensor cores take from shared memory as they were copied, and
the queries the columns, eight at least: at the power limit of a card what is saved is time. Gluon, Triton's language in
which shared memory and copies are written down, can say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pallas_kernels.decode_plan import DecodePlan
from pallas_kernels.gluon_linear import ring, rows_of
from pallas_kernels.triton_call import is_chaining
from pallas_kernels.triton_chain import chained
from pallas_kernels.triton_decode import COPIES, plan_items, run_kernel
from pallas_kernels.triton_decode_plan import ITEM
from pallas_kernels.triton_softmax import LOG2E

Array = jax.Array


@gluon.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, items_ptr, counters_ptr, out_ptr, partial_ptr, lse_ptr, table_width,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, GROUPS_PAD: gl.constexpr,
    ROWS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, AHEAD: gl.constexpr,
    PARTS: gl.constexpr, KEEP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (max_items * K,). As ``triton_decode``'s, for a cache of the queries' type; ``ROWS`` are GROUPS and padding.
    ``EARLY``: in a chain, where only queries and each sequence's newest key and value are not from before it."""
    gdc_launch_dependents()
    if not EARLY:
        gdc_wait()
    item, head = gl.program_id(0) // KV_HEADS, gl.program_id(0) % KV_HEADS
    number = gl.load(items_ptr)
    words = items_ptr + (1 + item) * ITEM
    seq, start, end, place = gl.load(words), gl.load(words + 1), gl.load(words + 2), gl.load(words + 3)
    first_place, count, length = gl.load(words + 4), gl.load(words + 5), gl.load(words + 6)
    mine = item < number
    if KEEP:
        mine &= length > 0
    if mine:
        row = seq * KV_HEADS + head
        acc, peak, total = _attend(
            q_ptr + row * GROUPS * DIM, k_ptr + head * DIM, v_ptr + head * DIM,
            tables_ptr + seq.to(gl.int64) * table_width, start, end, length,
            SCALE, WINDOW, KV_HEADS, GROUPS, ROWS, DIM, BLOCK_SIZE, TILE, AHEAD, EARLY,
        )  # fmt: skip
        acc = acc / gl.where(total == 0.0, 1.0, total)[None, :]
        columns: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
        result = gl.convert_layout(gl.permute(acc, (1, 0)), columns)
        group, dim = gl.arange(0, ROWS, gl.SliceLayout(1, columns)), gl.arange(0, DIM, gl.SliceLayout(0, columns))
        in_row = group[:, None] * DIM + dim[None, :]
        out = out_ptr + row * GROUPS * DIM
        if count == 1:
            gl.store(out + in_row, result.to(out_ptr.dtype.element_ty), mask=(group < GROUPS)[:, None])
        else:
            part = (place * KV_HEADS + head) * GROUPS
            gl.store(partial_ptr + part * DIM + in_row, result, mask=(group < GROUPS)[:, None])
            lse = gl.convert_layout(peak + gl.log2(total), gl.SliceLayout(1, columns))
            copy = gl.arange(0, COPIES, gl.SliceLayout(0, columns))
            copies = (part + group)[:, None] * COPIES + copy[None, :]
            gl.store(lse_ptr + copies, lse[:, None] + 0.0 * copy[None, :], mask=(group < GROUPS)[:, None])
            gl.barrier()  # all threads have stored before one of them says so
            if gl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == count - 1:
                gl.store(counters_ptr + row, 0)
                _combine(
                    partial_ptr, lse_ptr, out, first_place * KV_HEADS + head, count, KV_HEADS, GROUPS, GROUPS_PAD, DIM,
                    PARTS,
                )  # fmt: skip


@gluon.jit
def _load_queries(q_ptr, GROUPS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """``[ROWS, DIM]``, zeros beyond GROUPS."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    group, dim = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, DIM, gl.SliceLayout(0, layout))
    return gl.load(q_ptr + group[:, None] * DIM + dim[None, :], mask=(group < GROUPS)[:, None], other=0.0)


@gluon.jit
def _copy(tile, cache_ptr, blocks, at, first_seen, end, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Begin to fill ``[TILE, DIM]`` with what stands at the positions from ``at``; zeros before ``first_seen`` and from
    ``end`` on, since what stands there may be a broken request's NaN. ``blocks`` are those of the positions."""
    TILE: gl.constexpr = tile.shape[0]
    DIM: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = rows_of(DIM, gl.num_warps())
    position = at + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    offset = (blocks.to(gl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * (KV_HEADS * DIM)
    seen = (position >= first_seen) & (position < end)
    async_copy.async_copy_global_to_shared(tile, cache_ptr + offset[:, None] + dim[None, :], mask=seen[:, None])
    async_copy.commit_group()


@gluon.jit
def _wait_for_tile(AHEAD: gl.constexpr):
    """Until all threads' copies of the next tile are there, and nobody uses the one in front any more. (Triton puts the
    fences that the tensor cores need before each product.)"""
    async_copy.wait_group(2 * AHEAD - 1)
    gl.barrier()


@gluon.jit
def _after(slot, RING: gl.constexpr):
    return gl.where(slot == RING - 1, 0, slot + 1)


@gluon.jit
def _before(slot, RING: gl.constexpr):
    return gl.where(slot == 0, RING - 1, slot - 1)


@gluon.jit
def _blocks(table, at, end, TILE: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Of the positions from ``at``."""
    position = at + gl.arange(0, TILE, gl.SliceLayout(1, rows_of(DIM, gl.num_warps())))
    return gl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)


@gluon.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table, start, end, length,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """An online softmax over the keys from ``start`` to ``end``: the weighted sum of values ``[DIM, ROWS]``, the
    highest score and the sum of weights ``[ROWS]``."""
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    # A ring of tiles, keys and values by turns; each is asked for when the one in front of it has been used.
    RING: gl.constexpr = 2 * AHEAD + 1
    tiles = ring(RING, TILE, DIM, dtype)
    shared_queries, shared_weights = ring(1, ROWS, DIM, dtype).index(0), ring(1, ROWS, TILE, dtype).index(0)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
    total = gl.zeros([TILE, ROWS], gl.float32, mma)
    acc = gl.zeros([DIM, ROWS], gl.float32, mma)
    first, stop = start, end
    if WINDOW > 0:
        first = gl.maximum(start, length - WINDOW)
    if EARLY:
        stop = gl.minimum(end, length - 1)
    for n in gl.static_range(AHEAD):
        at = start + n * TILE
        blocks = _blocks(table, at, stop, TILE, DIM, BLOCK_SIZE)
        _copy(tiles.index(2 * n), k_ptr, blocks, at, first, stop, KV_HEADS, BLOCK_SIZE)
        _copy(tiles.index(2 * n + 1), v_ptr, blocks, at, first, stop, KV_HEADS, BLOCK_SIZE)
    # Blocks are looked up a tile ahead, so that the copies of keys and values do not wait for them.
    blocks = _blocks(table, start + AHEAD * TILE, stop, TILE, DIM, BLOCK_SIZE)
    if EARLY:
        gdc_wait()
    q = _load_queries(q_ptr, GROUPS, ROWS, DIM)
    shared_queries.store(q)
    slot = 0
    for at in range(start, stop, TILE):
        ahead = at + AHEAD * TILE
        _wait_for_tile(AHEAD)
        _copy(tiles.index(_before(slot, RING)), k_ptr, blocks, ahead, first, stop, KV_HEADS, BLOCK_SIZE)
        nothing = gl.zeros([TILE, ROWS], gl.float32, mma)
        scores = warpgroup_mma(tiles.index(slot), shared_queries.permute((1, 0)), nothing, use_acc=False) * SCALE
        next_blocks = _blocks(table, ahead + TILE, stop, TILE, DIM, BLOCK_SIZE)
        position = at + gl.arange(0, TILE, gl.SliceLayout(1, mma))
        weights, keep, peak = _weigh(scores, ((position >= first) & (position < stop))[:, None], peak)
        total = total * keep[None, :] + weights
        shared_weights.store(gl.permute(weights.to(dtype), (1, 0)))
        slot = _after(slot, RING)
        _wait_for_tile(AHEAD)
        _copy(tiles.index(_before(slot, RING)), v_ptr, blocks, ahead, first, stop, KV_HEADS, BLOCK_SIZE)
        acc = warpgroup_mma(tiles.index(slot).permute((1, 0)), shared_weights.permute((1, 0)), acc * keep[None, :])
        slot, blocks = _after(slot, RING), next_blocks
    async_copy.wait_group(0)
    sums = gl.sum(total, 0)
    if EARLY:  # noqa: SIM102 (what is constant is an if of its own)
        if (end == length) & (length > 0):
            acc, peak, sums = _attend_newest(
                q, k_ptr, v_ptr, table, length - 1, acc, peak, sums, SCALE, KV_HEADS, DIM, BLOCK_SIZE
            )
    return acc, peak, sums


@gluon.jit
def _weigh(scores, seen, peak):
    """The weights of scores, those of former weights, and the highest score so far."""
    scores = gl.where(seen, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 0))
    base = gl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet must not give inf - inf
    return gl.exp2(scores - base[None, :]), gl.exp2(peak - base), new_peak


@gluon.jit
def _attend_newest(
    q, k_ptr, v_ptr, table, position, acc, peak, total,
    SCALE: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Take in the key and the value at one more position."""
    block = gl.load(table + position // BLOCK_SIZE).to(gl.int64)
    offset = (block * BLOCK_SIZE + position % BLOCK_SIZE) * (KV_HEADS * DIM)
    key = gl.load(k_ptr + offset + gl.arange(0, DIM, gl.SliceLayout(0, q.type.layout)))
    value = gl.load(v_ptr + offset + gl.arange(0, DIM, gl.SliceLayout(1, acc.type.layout))).to(gl.float32)
    score = gl.sum(q.to(gl.float32) * key.to(gl.float32)[None, :], 1) * SCALE
    score = gl.convert_layout(score, peak.type.layout)
    new_peak = gl.maximum(peak, score)
    weight, keep = gl.exp2(score - new_peak), gl.exp2(peak - new_peak)
    rounded = weight.to(k_ptr.dtype.element_ty).to(gl.float32)
    return acc * keep[None, :] + value[:, None] * rounded[None, :], new_peak, total * keep + weight


@gluon.jit
def _combine(
    partial_ptr, lse_ptr, out, first, count,
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, GROUPS_PAD: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """As ``triton_decode``'s."""
    COLUMNS: gl.constexpr = GROUPS_PAD * DIM
    layout: gl.constexpr = gl.BlockedLayout([PARTS, COPIES], [1, 32], [1, gl.num_warps()], [1, 0])
    part, column = gl.arange(0, PARTS, gl.SliceLayout(1, layout)), gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    group, dim = column // DIM, column % DIM
    peak = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(0, layout))
    acc = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(0, layout))
    for at in range(0, count, PARTS):
        row = (first + (at + part) * KV_HEADS)[:, None] * GROUPS + group[None, :]
        there = (at + part < count)[:, None] & (group < GROUPS)[None, :]
        values = gl.load(partial_ptr + row * DIM + dim[None, :], mask=there, other=0.0)
        lse = gl.load(lse_ptr + row * COPIES + (column % COPIES)[None, :], mask=there, other=float("-inf"))
        new_peak = gl.maximum(peak, gl.max(lse, 0))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = gl.exp2(lse - base[None, :])
        keep = gl.exp2(peak - base)
        total = total * keep + gl.sum(weights, 0)
        acc = acc * keep + gl.sum(values * weights, 0)
        peak = new_peak
    result = acc / gl.where(total == 0.0, 1.0, total)
    gl.store(out + group * DIM + dim, result.to(out.dtype.element_ty), mask=group < GROUPS)


@dataclass(frozen=True)
class Tuning:
    """How programs work; found by measuring on an H200."""

    ahead: int
    """Tiles of keys, and of values, that are asked for before they are needed."""
    programs: int
    """About as many as run at once."""


FEW_ROWS = Tuning(ahead=2, programs=264)
"""Two programs a multiprocessor and, where heads are of 128, no room for more: in a chain they come while the kernel in
front still runs, and where four could be on one multiprocessor others would have none."""
MANY_ROWS = Tuning(ahead=1, programs=528)
"""Four programs a multiprocessor."""
FEWEST_ROWS, MOST_ROWS = 8, 16
"""Of the queries of a KV head, which are the columns of a product."""
TILE, WARPS = 64, 4
"""Keys of a tile: the fewest rows of a product by four warps."""


def choose_tuning(num_seqs: int) -> Tuning:
    return FEW_ROWS if num_seqs <= 32 else MANY_ROWS


def suits_decode(dtype: jnp.dtype, groups: int, dim: int) -> bool:
    """Whether the kernel takes queries and keys of this type, so many query heads a KV head, and heads of this size."""
    return dtype in (jnp.bfloat16, jnp.float16) and groups <= MOST_ROWS and dim in (64, 128)


def plan_decode(
    seq_lens: Array, *, kv_heads: int, max_seq_len: int, window: int | None, split_size: int | None
) -> DecodePlan:
    programs = choose_tuning(seq_lens.shape[0]).programs
    return plan_items(seq_lens, programs, kv_heads, max_seq_len, window, split_size)


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
    assert k_scale is None, "for the Triton kernel"
    assert v_scale is None, "for the Triton kernel"
    items, counters = plan.arrays
    early = is_chaining()
    run = partial(_attend_all, scale=scale, window=plan.window, early=early)
    attended, counters = (run if early else chained(run))(q, k_cache, v_cache, block_tables, items, counters, into)
    return attended, DecodePlan((items, counters), plan.window, plan.split_size)


def _attend_all(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    items: Array,
    counters: Array,
    into: Array | None,
    *,
    scale: float,
    window: int | None,
    early: bool,
) -> tuple[Array, Array]:
    """Attention, and the counters."""
    num_seqs, table_width = block_tables.shape
    _, block_size, kv_heads, dim = k_cache.shape
    groups, max_items = q.shape[1] // kv_heads, items.shape[0] - 1
    groups_pad = triton.next_power_of_2(groups)
    # Partial results that are loaded at once: 32 values a thread, or too few programs would share a multiprocessor.
    parts = max(1, min(8, 32 * 32 * WARPS // (groups_pad * dim)))
    return run_kernel(
        (q, k_cache, v_cache, block_tables, items), counters, into, (max_items, kv_heads, groups, dim),
        kernel=decode_kernel, grid=(max_items * kv_heads,), num_warps=WARPS, table_width=table_width,
        SCALE=scale * LOG2E, WINDOW=window or 0, KV_HEADS=kv_heads, GROUPS=groups, GROUPS_PAD=groups_pad,
        ROWS=max(groups_pad, FEWEST_ROWS), DIM=dim, BLOCK_SIZE=block_size, TILE=TILE,
        AHEAD=choose_tuning(num_seqs).ahead, PARTS=parts, KEEP=into is not None, EARLY=early,
    )  # fmt: skip
