"""Matrix products of few rows: what a decode step spends its time on is reading the weights, once.

A program owns a strip of weight columns and a stretch of the sum over K; all programs are resident at once, with enough
loads in flight to keep the memory busy. Weights are the first operand of the tensor cores (``SWAP``: the
transposed product), which then take few rows of ``x`` without padding them to 64. Partial sums of the stretches are
left, in float32, to the kernel that reads the result (split-K without atomics: the order of summation is fixed).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_share(
    next_ptr, program, BYTES: tl.constexpr, THREADS: tl.constexpr, SPLITS: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """Pull ``THREADS * BYTES`` bytes (a multiple of 16 each) of an array into the L2 cache; nobody waits for them.

    The programs take consecutive shares of the beginnings of ``SPLITS`` stretches that are ``STRIDE`` bytes apart: what
    the programs of a split matrix product read first."""
    at = (program % SPLITS).to(tl.int64) * STRIDE + (program // SPLITS).to(tl.int64) * (THREADS * BYTES)
    address = (next_ptr.to(tl.pointer_type(tl.int8)) + at + tl.arange(0, THREADS) * BYTES).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, BYTES],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_x(
    x, row, at, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    if TMA:
        tile = x.load([row, at])
    else:
        rows = row + tl.arange(0, BLOCK_M)
        offsets = rows[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        tile = tl.load(x + at + offsets, mask=(rows < M)[:, None], other=0.0, eviction_policy="evict_last")
    return tile


@triton.jit
def _load_w(w, at, column, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        tile = w.load([at, column])
    else:
        offsets = tl.arange(0, BLOCK_K)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
        tile = tl.load(w + tl.cast(at, tl.int64) * N + column + offsets, eviction_policy="evict_first")
    return tile


@triton.jit
def _multiply(x, w, acc, SWAP: tl.constexpr):
    return tl.dot(tl.trans(w), tl.trans(x), acc) if SWAP else tl.dot(x, w, acc)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, w, next_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, PREFETCH: tl.constexpr,
    NEXT_SPLITS: tl.constexpr, NEXT_STRIDE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Grid (M / BLOCK_M, N / BLOCK_N, SPLITS): partial sums ``out[SPLITS, M, N]`` of ``x[M, K] @ w[K, N]``.

    ``x`` and ``w`` are pointers, or descriptors of tiles (``TMA``). At its end a program pulls ``PREFETCH`` bytes a
    thread of the next weights, to be read in ``NEXT_SPLITS`` stretches, into the L2 cache."""
    row, column, split = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    blocks: tl.constexpr = K // BLOCK_K
    first, last = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for block in range(first, last):
        x_tile = _load_x(x, row, block * BLOCK_K, M, K, BLOCK_M, BLOCK_K, TMA)
        w_tile = _load_w(w, block * BLOCK_K, column, N, BLOCK_N, BLOCK_K, TMA)
        acc = _multiply(x_tile, w_tile, acc, SWAP)
    if PREFETCH > 0:
        program = (split * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        prefetch_share(next_ptr, program, PREFETCH, THREADS, NEXT_SPLITS, NEXT_STRIDE)
    if SWAP:
        acc = tl.trans(acc)
    rows = row + tl.arange(0, BLOCK_M)
    offsets = (split * M + rows).to(tl.int64)[:, None] * N + column + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit(do_not_specialize=["M"])
def gated_linear_kernel(
    x, w, next_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, PREFETCH: tl.constexpr,
    NEXT_SPLITS: tl.constexpr, NEXT_STRIDE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Grid (M / BLOCK_M, N / BLOCK_N): ``silu(x @ w[:, 0]) * (x @ w[:, 1])`` of ``x[M, K]`` and ``w[K, 2, N]``.

    Gate and up are rounded to the type of ``out[M, N]``, as if they had been stored; what follows is float32, rounded
    once."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, K // BLOCK_K):
        x_tile = _load_x(x, row, block * BLOCK_K, M, K, BLOCK_M, BLOCK_K, TMA)
        gate_tile = _load_w(w, block * BLOCK_K, column, 2 * N, BLOCK_N, BLOCK_K, TMA)
        up_tile = _load_w(w, block * BLOCK_K, column + N, 2 * N, BLOCK_N, BLOCK_K, TMA)
        gate = _multiply(x_tile, gate_tile, gate, SWAP)
        up = _multiply(x_tile, up_tile, up, SWAP)
    if PREFETCH > 0:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        prefetch_share(next_ptr, program, PREFETCH, THREADS, NEXT_SPLITS, NEXT_STRIDE)
    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    result = (gate * tl.sigmoid(gate) * up).to(dtype)
    if SWAP:
        result = tl.trans(result)
    rows = row + tl.arange(0, BLOCK_M)
    offsets = rows.to(tl.int64)[:, None] * N + column + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptr + offsets, result, mask=(rows < M)[:, None])
