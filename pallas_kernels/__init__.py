"""Attention over a paged KV cache, matrix products of few rows, and sampling: arrays in, arrays out, several
implementations behind each function.

Shapes: T tokens, S sequences, M blocks a sequence, N blocks of the cache, B tokens a block, H query heads,
K KV heads, D head size. A cache is ``[N, B, K, D]``; block 0 belongs to nobody and takes the writes of padding.
"""

from pallas_kernels.decode_plan import DecodePlan
from pallas_kernels.dispatch import (
    add_rms_norm,
    adjust_logits,
    backends,
    chained,
    decode_attention,
    gated_linear,
    linear,
    linear_parts,
    plan_decode,
    prefill_attention,
    rope_and_write,
    sample,
    suits_decode,
    suits_linear,
    swiglu,
)

__all__ = [
    "DecodePlan",
    "add_rms_norm",
    "adjust_logits",
    "backends",
    "chained",
    "decode_attention",
    "gated_linear",
    "linear",
    "linear_parts",
    "plan_decode",
    "prefill_attention",
    "rope_and_write",
    "sample",
    "suits_decode",
    "suits_linear",
    "swiglu",
]
