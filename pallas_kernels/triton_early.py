"""What the kernels of a chain (``triton_chain``) do before those in front of them are done."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter():
    """Let the next kernel come, then wait until all before this one have ended and what they wrote can be read.

    Every program passes here before it writes anything, or reads what a kernel of the chain writes; one that does
    neither need not, but some program of each kernel must: the one in front has ended then, which had waited likewise.
    """
    gdc_launch_dependents()
    gdc_wait()
