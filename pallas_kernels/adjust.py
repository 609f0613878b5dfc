"""What a request's options make of the model's logits before the sampler sees them: penalties, masks and biases."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sampling import SamplingRows, log_normalizers

Array = jax.Array

SEEN_MAX = 0x7FFF
"""The bits of ``seen`` that count how often a token was generated; the sign says that the prompt has it."""


class Penalties(NamedTuple):
    """Of R rows."""

    presence: Array  # float32 [R]; taken off every token that was generated; 0 does nothing
    frequency: Array  # float32 [R]; taken off for each time; 0 does nothing
    repetition: Array  # float32 [R]; divides or multiplies logits of generated and prompt tokens; 1 does nothing


class Allowed(NamedTuple):
    """Which tokens R rows may choose: a bit each, id i in bit i % 32 of word i // 32."""

    by_row: Array  # int32 [R, ceil(V / 32)]
    by_slot: Array  # int32 [S, ceil(V / 32)]; of all slots
    restricted: Array  # int32 [R]; 1 if the row's slot counts too, else 0


EDITS_AT_ONCE = 256
"""Edits come in blocks of so many."""


class Edits(NamedTuple):
    """What is added to single logits of R rows: E edits a row, a multiple of EDITS_AT_ONCE."""

    ids: Array  # int32 [R, E]; V and more: none
    lowest: Array  # int32 [R, E / EDITS_AT_ONCE]; of each block's ids, V or more of none
    highest: Array  # int32 [R, E / EDITS_AT_ONCE]; of each block's ids, -1 of none
    values: Array  # float32 [S, E]; of all slots

    @classmethod
    def of(cls, ids: Array, values: Array, vocab: int) -> Edits:
        blocks = ids.reshape(len(ids), -1, EDITS_AT_ONCE)
        return cls(ids, blocks.min(-1), jnp.where(blocks < vocab, blocks, -1).max(-1), values)


def adjust_logits(
    logits: Array, seen: Array, slots: Array, penalties: Penalties, allowed: Allowed, edits: Edits, _: SamplingRows
) -> tuple[Array, tuple[Array, ...]]:
    counts = seen[slots].astype(jnp.int32)
    generated = counts & SEEN_MAX
    repetition = jnp.where(counts != 0, penalties.repetition[:, None], 1.0)
    adjusted = jnp.where(logits > 0, logits / repetition, logits * repetition)
    adjusted -= penalties.frequency[:, None] * generated
    adjusted -= jnp.where(generated > 0, penalties.presence[:, None], 0.0)
    ids = jnp.arange(logits.shape[1])
    words = allowed.by_row & jnp.where(allowed.restricted[:, None] == 1, allowed.by_slot[slots], -1)
    bits = (words[:, ids // 32] >> (ids % 32)) & 1
    adjusted = jnp.where(bits == 1, adjusted, -jnp.inf)
    adjusted = adjusted.at[jnp.arange(len(slots))[:, None], edits.ids].add(edits.values[slots], mode="drop")
    return adjusted, (log_normalizers(logits),)
