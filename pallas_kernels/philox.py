"""Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): counter-based random bits.

The bits depend on key and counter alone, so a token's noise is the same in any slot, batch, shard or step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(a: Array, b: int) -> tuple[Array, Array]:
    """High and low half of the 64-bit product, from 16-bit limbs (there is no uint64 without x64 mode)."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16), a * jnp.uint32(b)


def philox(key: tuple[Array, Array], counter: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
    """Four uint32 of random bits for each element of the broadcast uint32 key and counter words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for round_index in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        step0 = jnp.uint32(round_index * _KEY_STEPS[0] & 0xFFFFFFFF)
        step1 = jnp.uint32(round_index * _KEY_STEPS[1] & 0xFFFFFFFF)
        c0, c1, c2, c3 = high1 ^ c1 ^ (k0 + step0), low1, high0 ^ c3 ^ (k1 + step1), low0
    return c0, c1, c2, c3


def vocabulary_bits(seeds: Array, choices: Array, positions: Array, vocab_size: int) -> Array:
    """uint32 ``[R, V]`` for rows with int32 ``seeds[R, 2]``, ``choices[R]`` and token ``positions[R]``.

    Key (seed low, seed high); counter (id // 4, position, choice, 0); id % 4 picks one of the four words.
    """
    words = [a.astype(jnp.uint32)[:, None] for a in (seeds[:, 0], seeds[:, 1], positions, choices)]
    groups = jnp.arange((vocab_size + 3) // 4, dtype=jnp.uint32)[None]
    zero = jnp.zeros((1, 1), jnp.uint32)
    bits = jnp.stack(philox((words[0], words[1]), (groups, words[2], words[3], zero)), axis=-1)
    return bits.reshape(seeds.shape[0], -1)[:, :vocab_size]
