"""The shapes that programs are compiled for: every step is padded to one of a short ladder."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

TOKENS_PER_ROW = 8
MAX_PREFILL_ROWS = 64
"""A prefill bucket of T tokens has room for T / 8 prompts, at least one and at most 64."""


@dataclass(frozen=True, order=True)
class Bucket:
    """``decode_rows`` sequences with one token each, then ``prefill_tokens`` tokens of ``prefill_rows`` sequences."""

    decode_rows: int
    prefill_tokens: int
    prefill_rows: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens

    def __str__(self) -> str:
        return f"{self.decode_rows} decode + {self.prefill_tokens} prefill"


@dataclass(frozen=True)
class Ladder:
    """All buckets: decode steps of each row size; prefill steps of each token size, alone or with decoding rows."""

    row_sizes: tuple[int, ...]
    token_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("row_sizes", "token_sizes"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"{name} must be increasing positive sizes, got {sizes}")

    @property
    def max_rows(self) -> int:
        return self.row_sizes[-1]

    @property
    def max_prefill_rows(self) -> int:
        """Prompts that one step can prefill."""
        return self._prefill_rows(self.token_sizes[-1])

    def _prefill_rows(self, tokens: int) -> int:
        return min(max(1, tokens // TOKENS_PER_ROW), MAX_PREFILL_ROWS, self.max_rows)

    def _mixed_rows(self) -> tuple[int, ...]:
        return (0, self.max_rows)

    def all(self) -> list[Bucket]:
        """Every bucket, the smallest first."""
        decode = [Bucket(rows, 0, 0) for rows in self.row_sizes]
        mixed = [Bucket(r, t, self._prefill_rows(t)) for t in self.token_sizes for r in self._mixed_rows()]
        return sorted(decode + mixed, key=lambda b: b.tokens)

    def choose(self, decode_rows: int, prefill_tokens: int, prefill_rows: int) -> Bucket:
        """The smallest bucket that holds a step of this size; the scheduler's limits see to it that there is one."""
        if not prefill_tokens:
            return Bucket(_at_least(self.row_sizes, decode_rows), 0, 0)
        rows = _at_least(self._mixed_rows(), decode_rows)
        tokens = next(t for t in self.token_sizes if t >= prefill_tokens and self._prefill_rows(t) >= prefill_rows)
        return Bucket(rows, tokens, self._prefill_rows(tokens))


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    return sizes[bisect_left(sizes, wanted)]


def doubling(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    """first, first * factor, … up to and including last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
