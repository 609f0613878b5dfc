"""Matrix products of few rows within a chain of kernels (``triton_chain``): ``triton_linear``'s, whose weights are on
their way into shared memory while the kernel in front still computes ``x``.

Triton's own pipelining copies ``x`` and weights together, so that no weights could come before ``x`` is there; hence
Gluon, Triton's language in which shared memory and copies are written down. (Weights brought into the L2 cache alone
gain nothing: multiprocessors read that hardly faster than an H200's memory.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _ring(STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], layout)


@gluon.jit
def _copy(tile, pointer, stride, last_row):  # type: ignore[no-untyped-def]
    """Begin to fill a tile in shared memory with rows, ``stride`` elements from each other, up to ``last_row``."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0]
    )
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    async_copy.async_copy_global_to_shared(tile, pointer + row * stride + column, mask=row <= last_row)


@gluon.jit
def _copy_w(w_ring, stage, w_ptr, block, column, N, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of weights, or one of gate weights and one of up weights."""
    ROWS: gl.constexpr = w_ring.shape[1]
    PARTS: gl.constexpr = 2 if GATED else 1
    start = w_ptr + (block * ROWS).to(gl.int64) * (N * PARTS) + column
    for part in gl.static_range(PARTS):
        _copy(w_ring.index(stage * PARTS + part), start + part * N, N * PARTS, ROWS)


@gluon.jit(do_not_specialize=["last_row", "blocks"])
def linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, last_row, blocks, out_ptr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``triton_linear``'s ``linear_kernel``, or its ``gated_linear_kernel``."""
    _launch_next()
    column, split = gl.program_id(0) * BLOCK_N, gl.program_id(1)
    N, K = gl.num_programs(0) * BLOCK_N, blocks * BLOCK_K
    first, last = split * blocks // gl.num_programs(1), (split + 1) * blocks // gl.num_programs(1)
    dtype: gl.constexpr = w_ptr.dtype.element_ty
    TILES: gl.constexpr = 2 if GATED else 1
    w_ring, x_ring = _ring(STAGES * TILES, BLOCK_K, BLOCK_N, dtype), _ring(STAGES, BLOCK_M, BLOCK_K, dtype)
    # In the order in which they arrive: weights of all stages but one, then x's; from there on both together.
    for s in gl.static_range(STAGES - 1):
        if first + s < last:
            _copy_w(w_ring, s, w_ptr, first + s, column, N, GATED)
        async_copy.commit_group()
    _wait()
    for s in gl.static_range(STAGES - 1):
        if first + s < last:
            _copy(x_ring.index(s), x_ptr + (first + s) * BLOCK_K, K, last_row)
        async_copy.commit_group()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    gate = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
    up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
    for block in range(first, last):
        stage = (block - first) % STAGES
        async_copy.wait_group(STAGES - 2)
        x = x_ring.index(stage).permute((1, 0))
        gate_token = warpgroup_mma(w_ring.index(stage * TILES).permute((1, 0)), x, gate, is_async=True)
        if GATED:
            up_token = warpgroup_mma(w_ring.index(stage * TILES + 1).permute((1, 0)), x, up, is_async=True)
        ahead = block + STAGES - 1
        if ahead < last:
            free = (ahead - first) % STAGES
            _copy_w(w_ring, free, w_ptr, ahead, column, N, GATED)
            _copy(x_ring.index(free), x_ptr + ahead * BLOCK_K, K, last_row)
        async_copy.commit_group()
        if GATED:
            gate, up = warpgroup_mma_wait(0, deps=[gate_token, up_token])
        else:
            gate = warpgroup_mma_wait(0, deps=[gate_token])
    if GATED:
        gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
        gate = gate * (1 / (1 + gl.exp(-gate))) * up
    _store(out_ptr, gate.to(out_ptr.dtype.element_ty), split * (last_row + 1), column, last_row, N)


@gluon.jit
def _store(out_ptr, result, first_row, column, last_row, N):  # type: ignore[no-untyped-def]
    """``[BLOCK_N, BLOCK_M]``, transposed."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    result = gl.convert_layout(gl.permute(result, (1, 0)), layout)
    row = gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))
    offsets = (first_row + row).to(gl.int64)[:, None] * N + column
    offsets += gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + offsets, result, mask=(row <= last_row)[:, None])


@gluon.jit
def _launch_next():  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait():  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
