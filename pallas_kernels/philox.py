"""Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): counter-based random bits.

The bits depend on key and counter alone, so a token's noise is the same in any slot, batch, shard or step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

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
    shape = jnp.broadcast_shapes(*(word.shape for word in (*key, *counter)))

    def round_(index: Array, words: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        c0, c1, c2, c3 = words
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        step0, step1 = (index.astype(jnp.uint32) * jnp.uint32(step) for step in _KEY_STEPS)
        return high1 ^ c1 ^ (k0 + step0), low1, high0 ^ c3 ^ (k1 + step1), low0

    # A loop, since a CPU's compiler computes unrolled rounds again for each of the four words.
    return lax.fori_loop(0, _ROUNDS, round_, tuple(jnp.broadcast_to(word, shape) for word in counter))


def vocabulary_bits(seeds: Array, choices: Array, positions: Array, vocab_size: int) -> Array:
    """uint32 ``[R, V]`` for rows with int32 ``seeds[R, 2]``, ``choices[R]`` and token ``positions[R]``.

    Key (seed low, seed high); counter (id // 4, position, choice, 0); id % 4 picks one of the four words.
    """
    words = [a.astype(jnp.uint32)[:, None] for a in (seeds[:, 0], seeds[:, 1], positions, choices)]
    groups = jnp.arange((vocab_size + 3) // 4, dtype=jnp.uint32)[None]
    zero = jnp.zeros((1, 1), jnp.uint32)
    bits = jnp.stack(philox((words[0], words[1]), (groups, words[2], words[3], zero)), axis=-1)
    return bits.reshape(seeds.shape[0], -1)[:, :vocab_size]


def token_bits(seeds: Array, choices: Array, positions: Array, ids: Array) -> Array:
    """The same of some ids, int32 ``[R, N]``: uint32 ``[R, N]``."""
    words = [a.astype(jnp.uint32)[:, None] for a in (seeds[:, 0], seeds[:, 1], positions, choices)]
    groups, zero = (ids // 4).astype(jnp.uint32), jnp.zeros((1, 1), jnp.uint32)
    bits = philox((words[0], words[1]), (groups, words[2], words[3], zero))
    return jnp.select([ids % 4 == word for word in range(4)], bits)
