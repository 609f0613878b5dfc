"""What a request's options make of the model's logits before the sampler sees them: penalties and masks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sampling import log_normalizers

Array = jax.Array

SEEN_MAX = 0x7FFF
"""The bits of ``seen`` that count how often a token was generated; the sign says that the prompt has it."""


class Penalties(NamedTuple):
    """Of R rows."""

    presence: Array  # float32 [R]; taken off every token that was generated; 0 does nothing
    frequency: Array  # float32 [R]; taken off for each time; 0 does nothing
    repetition: Array  # float32 [R]; divides or multiplies logits of generated and prompt tokens; 1 does nothing


def adjust_logits(
    logits: Array, seen: Array, slots: Array, penalties: Penalties, allowed: Array
) -> tuple[Array, Array]:
    counts = seen[slots].astype(jnp.int32)
    generated = counts & SEEN_MAX
    repetition = jnp.where(counts != 0, penalties.repetition[:, None], 1.0)
    adjusted = jnp.where(logits > 0, logits / repetition, logits * repetition)
    adjusted -= penalties.frequency[:, None] * generated
    adjusted -= jnp.where(generated > 0, penalties.presence[:, None], 0.0)
    ids = jnp.arange(logits.shape[1])
    bits = (allowed[:, ids // 32] >> (ids % 32)) & 1
    return jnp.where(bits == 1, adjusted, -jnp.inf), log_normalizers(logits)
