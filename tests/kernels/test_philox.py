"""Random bits that depend on key and counter alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.philox import philox, vocabulary_bits

PI = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"

bits_of = jax.jit(vocabulary_bits, static_argnames="vocab_size")


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter_and_key", "expected"),
    [
        ("00000000 " * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter_and_key, expected):
    """The vectors that Random123, the authors' library, publishes for philox4x32 with 10 rounds."""
    *counter, k0, k1 = (jnp.uint32(word) for word in words(counter_and_key))
    assert [int(word) for word in jax.jit(philox)((k0, k1), tuple(counter))] == words(expected)


def rows(*items: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrays for ``vocabulary_bits`` from (64-bit seed, choice, position) of each row."""
    seeds, choices, positions = zip(*items, strict=True)
    return np.array(seeds, np.int64).view(np.int32).reshape(-1, 2), np.int32(choices), np.int32(positions)


def test_where_a_row_stands_does_not_matter():
    items = [(seed, choice, position) for seed in (-7, 3) for choice in (0, 2) for position in (0, 900)]
    together = np.asarray(bits_of(*rows(*items), vocab_size=103))
    turned = np.asarray(bits_of(*rows(*items[::-1]), vocab_size=103))
    np.testing.assert_array_equal(together, turned[::-1])
    for item, expected in zip(items, together, strict=True):
        np.testing.assert_array_equal(bits_of(*rows(item), vocab_size=103)[0], expected)


def test_a_shard_of_the_vocabulary_has_the_bits_of_the_whole():
    items = rows((1, 0, 5), (2, 1, 6))
    np.testing.assert_array_equal(bits_of(*items, vocab_size=103)[:, :50], bits_of(*items, vocab_size=50))


def test_bits_follow_the_written_layout():
    """Key (seed low, seed high), counter (id // 4, position, choice, 0), word id % 4: what every other implementation
    must agree on, so that a seed gives the same text everywhere."""
    seed, choice, position, token = 0x1234_5678_9ABC_DEF0, 3, 77, 42
    key = (jnp.uint32(0x9ABCDEF0), jnp.uint32(0x12345678))
    counter = tuple(jnp.uint32(word) for word in (token // 4, position, choice, 0))
    expected = jax.jit(philox)(key, counter)[token % 4]
    assert bits_of(*rows((seed, choice, position)), vocab_size=103)[0, token] == expected


def test_seed_choice_and_position_each_matter():
    """Both halves of the seed too. All bits differ from all others: a collision among 32-bit words is not expected."""
    seeds = (0, 1, 1 << 32, -1)
    items = [(seed, choice, position) for seed in seeds for choice in range(3) for position in range(3)]
    bits = np.asarray(bits_of(*rows(*items), vocab_size=64))
    assert len(np.unique(bits)) == bits.size


def test_bits_are_fair():
    """Each of the 32 bits is set half of the time, to five standard deviations."""
    bits = np.asarray(bits_of(*rows((5, 0, 1)), vocab_size=1 << 16))[0]
    ones = (bits[:, None] >> np.arange(32, dtype=np.uint32) & 1).sum(0)
    assert np.abs(ones / len(bits) - 0.5).max() < 5 * 0.5 / np.sqrt(len(bits))
