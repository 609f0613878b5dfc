"""SwiGLU's gate in one kernel."""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from pallas_kernels.triton_call import triton_call

Array = jax.Array

TILE, NUM_WARPS = 1024, 4


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Grid (T * TILES,): a stretch of a row a program. Each operation is rounded to the operands' type, as the
    reference's are."""
    program = tl.program_id(0)
    row, column = (program // TILES).to(tl.int64), program % TILES * TILE + tl.arange(0, TILE)
    here = column < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + column, mask=here, other=0.0)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * WIDTH + column, mask=here, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + column, silu * up, mask=here)


def plan_swiglu(shape: tuple[int, ...]) -> tuple[tuple[int], dict[str, int]]:
    """Grid and static parameters."""
    rows, _, width = shape
    tiles = triton.cdiv(width, TILE)
    return (rows * tiles,), dict(WIDTH=width, TILE=TILE, TILES=tiles)


def swiglu(gate_up: Array) -> Array:
    rows, _, width = gate_up.shape
    grid, parameters = plan_swiglu(gate_up.shape)
    result: Array = triton_call(
        gate_up, kernel=swiglu_kernel, grid=grid, num_warps=NUM_WARPS,
        out_type=jax.ShapeDtypeStruct((rows, width), gate_up.dtype), **parameters,
    )  # fmt: skip
    return result
