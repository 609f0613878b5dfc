"""Matrix products of few rows within a chain of kernels (``triton_chain``): ``triton_linear``'s, whose weights are on
their way into shared memory while the kernel in front still computes ``x``.

Triton's own pipelining copies ``x`` and weights together, so that no weights could come before ``x`` is there; hence
Gluon, Triton's language in which shared memory and copies are written down. (Prefetching weights into the L2 cache
alone gained nothing.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def ring(STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for so many tiles."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], layout)


@gluon.jit
def _copy_x(tile, x_ptr, block, K, last_row):
    """Begin to fill a tile ``[BLOCK_M, BLOCK_K]``."""
    BLOCK_K: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = rows_of(BLOCK_K, gl.num_warps())
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = block * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    async_copy.async_copy_global_to_shared(tile, x_ptr + row * K + column, mask=row <= last_row)


@gluon.jit
def _copy_w(tile, w_ptr, block, column, N, PARTS: gl.constexpr):
    """Begin to fill a tile ``[BLOCK_K, PARTS * BLOCK_N]`` from the same columns of each of the parts of ``w``."""
    BLOCK_K: gl.constexpr = tile.shape[0]
    BLOCK_N: gl.constexpr = tile.shape[1] // PARTS
    layout: gl.constexpr = rows_of(BLOCK_N * PARTS, gl.num_warps())
    row = gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))[:, None]
    index = gl.arange(0, BLOCK_N * PARTS, gl.SliceLayout(0, layout))[None, :]
    start = w_ptr + (block * BLOCK_K).to(gl.int64) * (N * PARTS) + column
    offsets = row * (N * PARTS) + index // BLOCK_N * (N - BLOCK_N) + index
    async_copy.async_copy_global_to_shared(tile, start + offsets)


@gluon.constexpr_function
def rows_of(columns, warps):
    """Who copies which eight elements of a tile."""
    threads = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.jit(do_not_specialize=["last_row", "blocks"])
def linear_kernel(
    x_ptr, w_ptr, last_row, blocks, out_ptr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``triton_linear``'s ``linear_kernel``, or its ``gated_linear_kernel``, with the same grid."""
    gdc_launch_dependents()
    column, split = gl.program_id(0) * BLOCK_N, gl.program_id(1)
    N, K = gl.num_programs(0) * BLOCK_N, blocks * BLOCK_K
    first, last = split * blocks // gl.num_programs(1), (split + 1) * blocks // gl.num_programs(1)
    dtype: gl.constexpr = w_ptr.dtype.element_ty
    PARTS: gl.constexpr = 2 if GATED else 1
    w_ring, x_ring = ring(STAGES, BLOCK_K, PARTS * BLOCK_N, dtype), ring(STAGES, BLOCK_M, BLOCK_K, dtype)
    # Groups of copies, in the order in which they are waited for: the weights of the first tiles, then their rows of x,
    # then both of each tile that follows. When all groups but the last STAGES - 2 are there, so is the next tile.
    for s in gl.static_range(STAGES - 1):
        if first + s < last:
            _copy_w(w_ring.index(s), w_ptr, first + s, column, N, PARTS)
        async_copy.commit_group()
    gdc_wait()
    for s in gl.static_range(STAGES - 1):
        if first + s < last:
            _copy_x(x_ring.index(s), x_ptr, first + s, K, last_row)
        async_copy.commit_group()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    acc = gl.zeros([PARTS * BLOCK_N, BLOCK_M], gl.float32, mma)
    for block in range(first, last):
        stage = (block - first) % STAGES
        async_copy.wait_group(STAGES - 2)
        w, x = w_ring.index(stage).permute((1, 0)), x_ring.index(stage).permute((1, 0))
        token = warpgroup_mma(w, x, acc, is_async=True)
        ahead = block + STAGES - 1
        if ahead < last:
            free = (ahead - first) % STAGES
            _copy_w(w_ring.index(free), w_ptr, ahead, column, N, PARTS)
            _copy_x(x_ring.index(free), x_ptr, ahead, K, last_row)
        async_copy.commit_group()
        acc = warpgroup_mma_wait(0, deps=[token])
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(acc.to(dtype).to(gl.float32), [2, BLOCK_N, BLOCK_M]), (1, 2, 0)))
        result = gate * (1 / (1 + gl.exp(-gate))) * up
    else:
        result = acc
    _store(out_ptr, result.to(out_ptr.dtype.element_ty), split * (last_row + 1), column, last_row, N)


@gluon.jit
def _store(out_ptr, result, first_row, column, last_row, N):
    """``[BLOCK_N, BLOCK_M]``, transposed."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    result = gl.convert_layout(gl.permute(result, (1, 0)), layout)
    row = gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    offsets = (first_row + row).to(gl.int64)[:, None] * N + column
    offsets += gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + offsets, result, mask=(row <= last_row)[:, None])
