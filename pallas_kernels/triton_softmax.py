"""One step of an online softmax (Milakov and Gimelshein, arXiv:1805.02867), in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
"""Scores are scaled by this, so that powers of two take the place of exponentials."""


@triton.jit
def accumulate(scores, values, acc, peak, total, PRECISION: tl.constexpr):
    """Take in a tile of ``scores[M, N]`` (base 2, -inf where masked) and ``values[N, D]``. State: ``acc[M, D]``, the
    weighted sum of values; ``peak[M]``, the highest score; ``total[M]``, the sum of weights."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that saw nothing yet must not give inf - inf
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(peak - base)
    total = total * keep + tl.sum(weights, 1)
    acc = acc * keep[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return acc, new_peak, total
