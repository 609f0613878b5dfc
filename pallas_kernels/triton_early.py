"""What the kernels of a chain (``triton_chain``) do before those in front of them are done."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter():
    """Let the next kernel come, then wait until all before this one have ended and what they wrote can be read.

    Every program passes here before it writes anything, or reads what a kernel of the chain writes. One that does
    neither may end without; but at least one program of each kernel waits, so that a kernel's end implies that of all
    before it.
    """
    gdc_launch_dependents()
    gdc_wait()
