"""Matrix products of few rows: what a decode step spends its time on is reading the weights, once.

A program owns a strip of weight columns and a stretch of the sum over K; all programs are resident at once, with enough
loads in flight to keep the memory busy. Weights are the first operand of the tensor cores (the transposed product),
which then take few rows of ``x`` without padding them to 64. Partial sums of the stretches are left, in float32, to the
kernel that reads the result (split-K without atomics: the order of summation is fixed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import gluon_linear
from pallas_kernels.triton_call import is_chaining, triton_call

Array = jax.Array


@triton.jit
def _load_x(x_ptr, at, K, last_row, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Transposed: ``[BLOCK_K, BLOCK_M]``."""
    rows = tl.arange(0, BLOCK_M)
    offsets = rows[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    tile = tl.load(x_ptr + at + offsets, mask=(rows <= last_row)[:, None], other=0.0, eviction_policy="evict_last")
    return tl.trans(tile)


@triton.jit
def _load_w(w_ptr, at, column, N, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Transposed: ``[BLOCK_N, BLOCK_K]``."""
    offsets = tl.arange(0, BLOCK_K)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
    return tl.trans(tl.load(w_ptr + tl.cast(at, tl.int64) * N + column + offsets, eviction_policy="evict_first"))


@triton.jit
def _store(out_ptr, result, first_row, column, last_row, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    offsets = (first_row + rows).to(tl.int64)[:, None] * N + column + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptr + offsets, tl.trans(result.to(out_ptr.dtype.element_ty)), mask=(rows <= last_row)[:, None])


@triton.jit(do_not_specialize=["last_row", "blocks"])
def linear_kernel(
    x_ptr, w_ptr, last_row, blocks, out_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Grid (N / BLOCK_N, splits): partial sums ``out[splits, M, N]`` of ``x[M, K] @ w[K, N]``.

    M is ``last_row`` + 1 (of a number 1, jax-triton would make a constant, and another kernel), K is ``blocks`` *
    BLOCK_K."""
    column, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    N, K = tl.num_programs(0) * BLOCK_N, blocks * BLOCK_K
    first, last = split * blocks // tl.num_programs(1), (split + 1) * blocks // tl.num_programs(1)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first, last):
        x = _load_x(x_ptr, block * BLOCK_K, K, last_row, BLOCK_M, BLOCK_K)
        acc = tl.dot(_load_w(w_ptr, block * BLOCK_K, column, N, BLOCK_N, BLOCK_K), x, acc)
    _store(out_ptr, acc, split * (last_row + 1), column, last_row, N, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["last_row", "blocks"])
def gated_linear_kernel(
    x_ptr, w_ptr, last_row, blocks, out_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Grid (N / BLOCK_N,): ``silu(x @ w[:, 0]) * (x @ w[:, 1])`` of ``x[M, K]`` and ``w[K, 2, N]``.

    Gate and up are rounded to the type of ``out[M, N]``, as if they had been stored; what follows is float32, rounded
    once."""
    column = tl.program_id(0) * BLOCK_N
    N, K = tl.num_programs(0) * BLOCK_N, blocks * BLOCK_K
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(blocks):
        x = _load_x(x_ptr, block * BLOCK_K, K, last_row, BLOCK_M, BLOCK_K)
        gate = tl.dot(_load_w(w_ptr, block * BLOCK_K, column, 2 * N, BLOCK_N, BLOCK_K), x, gate)
        up = tl.dot(_load_w(w_ptr, block * BLOCK_K, column + N, 2 * N, BLOCK_N, BLOCK_K), x, up)
    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    _store(out_ptr, gate * tl.sigmoid(gate) * up, 0, column, last_row, N, BLOCK_M, BLOCK_N)


@dataclass(frozen=True)
class Tile:
    """Columns and depth of a program's tile of weights, warps, and programs that share a multiprocessor at most.

    To have as many, a sum may be split; but partial sums cost their readers time, the more the more rows there are."""

    n: int
    k: int
    num_warps: int = 4
    resident: int = 1


# By kind of product and most rows; from times of products and whole steps on an H200 (bench/linear_sweep.py).
TILES: dict[str, dict[int, Tile]] = {
    "parts": {16: Tile(128, 128, resident=2), 32: Tile(128, 128), 64: Tile(64, 128), 128: Tile(64, 128)},
    "gated": {16: Tile(128, 64), 32: Tile(128, 64), 64: Tile(64, 64, resident=2), 128: Tile(128, 64, num_warps=8)},
    "whole": dict.fromkeys((16, 32, 64, 128), Tile(128, 64, resident=2)),
}
MULTIPROCESSORS = 132
SHARED_BYTES = 228 << 10
"""Of a Hopper multiprocessor, for its programs together; each is charged one KiB more than it asks for."""
MAX_STAGES, MAX_SPLITS, MIN_BLOCKS = 10, 8, 4
"""MIN_BLOCKS: tiles of a stretch of the sum, so that its loads overlap."""


@dataclass(frozen=True)
class LinearPlan:
    """Launch parameters, from shapes alone."""

    grid: tuple[int, int]
    blocks: int
    parameters: dict[str, int]
    options: dict[str, int]

    @property
    def splits(self) -> int:
        return self.grid[1]


def plan_linear(kind: str, rows: int, depth: int, columns: int) -> LinearPlan | None:
    """How to multiply ``[rows, depth]`` by ``[depth, columns]`` ("gated": by two of these), or None where that is for
    XLA: from 129 rows on, where its products are as fast, and for shapes that tiles do not divide. The sum is split in
    "parts" only, not in "gated" and "whole" products."""
    block_m = next((most for most in TILES[kind] if rows <= most), None)
    if block_m is None:
        return None
    tile = TILES[kind][block_m]
    if columns % tile.n or depth % tile.k:
        return None
    strips, blocks = columns // tile.n, depth // tile.k
    splits = _splits(strips, blocks, tile.resident) if kind == "parts" else 1
    resident = min(triton.cdiv(strips * splits, MULTIPROCESSORS), tile.resident)
    stage_bytes = 2 * tile.k * (tile.n * (2 if kind == "gated" else 1) + block_m)
    stages = (SHARED_BYTES // resident - 1024) // stage_bytes
    return LinearPlan(
        grid=(strips, splits),
        blocks=blocks,
        parameters=dict(BLOCK_M=block_m, BLOCK_N=tile.n, BLOCK_K=tile.k),
        options=dict(num_warps=tile.num_warps, num_stages=min(stages, MAX_STAGES)),
    )


def _splits(strips: int, blocks: int, resident: int) -> int:
    """The fewest stretches that keep nine tenths of the multiprocessors equally busy, or else the best there is."""

    def busy(splits: int) -> float:
        programs = strips * splits
        return programs / (triton.cdiv(programs, MULTIPROCESSORS) * MULTIPROCESSORS)

    most = min(MULTIPROCESSORS * resident // strips, MAX_SPLITS, blocks // MIN_BLOCKS)
    choices = range(1, max(most, 1) + 1)
    return next((splits for splits in choices if busy(splits) >= 0.9), max(choices, key=busy))


def suits_linear(kind: str, rows: int, depth: int, columns: int, dtype: jnp.dtype) -> bool:
    return dtype in (jnp.bfloat16, jnp.float16) and plan_linear(kind, rows, depth, columns) is not None


def _call(kernel: Any, kind: str, x: Array, w: Array, columns: int, dtype: jnp.dtype | None = None) -> Array:
    """``[splits, T, columns]``; without a ``dtype``, float32 partial sums, or x's type if there is but one."""
    rows, depth = x.shape
    plan = plan_linear(kind, rows, depth, columns)
    assert plan is not None, "ask suits_linear first"
    dtype = dtype or (jnp.float32 if plan.splits > 1 else x.dtype)
    out_type = jax.ShapeDtypeStruct((plan.splits, rows, columns), dtype)
    parameters = plan.parameters | plan.options
    if is_chaining():
        kernel = gluon_linear.linear_kernel
        parameters |= dict(GATED=kind == "gated", STAGES=plan.options["num_stages"])
    result: Array = triton_call(
        x, w, rows - 1, plan.blocks, kernel=kernel, grid=plan.grid, out_type=out_type, **parameters
    )
    return result


def linear_parts(x: Array, w: Array) -> Array:
    return _call(linear_kernel, "parts", x, w, w.shape[1])


def linear(x: Array, w: Array, *, dtype: jnp.dtype) -> Array:
    return _call(linear_kernel, "whole", x, w, w.shape[1], dtype)[0]


def gated_linear(x: Array, w: Array) -> Array:
    return _call(gated_linear_kernel, "gated", x, w, w.shape[2])[0]
