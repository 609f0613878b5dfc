"""What the kernels of a chain (``triton_chain``) do before those in front of them are done."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter():  # type: ignore[no-untyped-def]
    """Let the next kernel come, then wait until all before this one have ended and what they wrote can be read.

    Every program passes here before it writes anything, or reads what a kernel of the chain writes; one that does
    neither need not, but some program of each kernel must: the one in front has ended then, which had waited likewise.
    """
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def fetch(pointers, NBYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for ``NBYTES`` (a multiple of 16) from each of these addresses to be brought into the L2 cache."""
    sizes = tl.full(pointers.shape, NBYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [pointers.to(tl.int64), sizes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
