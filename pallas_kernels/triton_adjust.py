"""Penalties and masks in Triton: one pass, which also sums the exponentials of what the model gave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.adjust import SEEN_MAX, Penalties
from pallas_kernels.triton_call import triton_call
from pallas_kernels.triton_sampling_kernels import exponentials

Array = jax.Array

COUNT_BITS = tl.constexpr(SEEN_MAX)
CHUNK = 4096


@triton.jit
def adjust_kernel(
    logits_ptr, seen_ptr, slots_ptr, presence_ptr, frequency_ptr, repetition_ptr, allowed_ptr, out_ptr, sums_ptr,
    VOCAB: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (R, chunks): ``out[R, VOCAB]``, and ``sums[R, 2, chunks]``, each chunk's largest logit and sum of
    exponentials relative to it. ``allowed`` are WORDS words of bits a row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    x = tl.load(logits_ptr + row * VOCAB + ids, mask=inside, other=float("-inf"))
    peak, total = exponentials(x, ids, VOCAB)
    tl.store(sums_ptr + row * 2 * CHUNKS + chunk, peak)
    tl.store(sums_ptr + (row * 2 + 1) * CHUNKS + chunk, total)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
        slot = tl.load(slots_ptr + row).to(tl.int64)
        counts = tl.load(seen_ptr + slot * VOCAB + ids, mask=inside, other=0).to(tl.int32)
        generated = counts & COUNT_BITS
        repeated = tl.where(x > 0.0, x / repetition, x * repetition)
        x = tl.where(counts != 0, repeated, x) - frequency * generated.to(tl.float32)
        x -= tl.where(generated > 0, presence, 0.0)
    words = tl.load(allowed_ptr + row * WORDS + ids // 32, mask=inside, other=0)
    x = tl.where((words >> (ids % 32)) & 1 == 1, x, float("-inf"))
    tl.store(out_ptr + row * VOCAB + ids, x, mask=inside)


def adjust_logits(
    logits: Array, seen: Array, slots: Array, penalties: Penalties, allowed: Array
) -> tuple[Array, Array]:
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    shapes = (logits.shape, (rows, 2, chunks))
    adjusted, sums = triton_call(
        logits, seen, slots, *penalties, allowed,
        kernel=adjust_kernel, grid=(rows, chunks), num_warps=8,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        VOCAB=vocab, WORDS=allowed.shape[1], CHUNK=CHUNK, CHUNKS=chunks,
    )  # fmt: skip
    return adjusted, normalizers_of(sums)


def normalizers_of(sums: Array) -> Array:
    """The logarithms of the rows' sums ``[R]``, of the chunks' ``[R, 2, chunks]``."""
    peaks = sums[:, 0].max(-1, keepdims=True)
    return peaks[:, 0] + jnp.log(jnp.sum(sums[:, 1] * jnp.exp(sums[:, 0] - peaks), -1))
