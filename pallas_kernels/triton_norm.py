"""Residual addition and RMSNorm in one kernel."""

from __future__ import annotations

from typing import Any

import jax
import triton
import triton.language as tl

from pallas_kernels.triton_call import triton_call
from pallas_kernels.triton_early import enter

Array = jax.Array


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, norm_ptr,
    EPS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, PARTS: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (T,): a row. ``delta`` is the sum of ``PARTS`` partial results ``[PARTS, T, WIDTH]``. It and the sum are
    rounded to x's type before the row is normed, as if stored and read again."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, WIDTH_PAD)
    here = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=here, other=0.0)
    if CHAINED:
        enter()
    x = tl.load(x_ptr + row + column, mask=here, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + row + column, mask=here, other=0.0).to(tl.float32)
    part_size = tl.num_programs(0).to(tl.int64) * WIDTH
    for part in tl.static_range(1, PARTS):
        delta += tl.load(delta_ptr + part * part_size + row + column, mask=here, other=0.0).to(tl.float32)
    x += delta.to(sum_ptr.dtype.element_ty).to(tl.float32)
    total = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + column, total, mask=here)
    x = total.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    tl.store(norm_ptr + row + column, weight * x.to(weight.dtype), mask=here)


def plan_add_rms_norm(delta_shape: tuple[int, ...], eps: float) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and static parameters."""
    parts, tokens, width = delta_shape
    return (tokens,), dict(EPS=eps, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), PARTS=parts)


def add_rms_norm(x: Array, delta: Array, weight: Array, *, eps: float) -> tuple[Array, Array]:
    grid, parameters = plan_add_rms_norm(delta.shape, eps)
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, norm = triton_call(
        x, delta, weight, kernel=add_rms_norm_kernel, grid=grid, num_warps=8 if x.shape[1] >= 2048 else 4,
        out_type=[struct, struct], **parameters,
    )  # fmt: skip
    return total, norm
