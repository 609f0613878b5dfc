"""The shapes that programs are compiled for: every step is padded to one of a short ladder."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

TOKENS_PER_ROW = 8
MAX_PREFILL_ROWS = 64
"""A mixed bucket of T tokens has room for T / 8 prompts, at least one and at most 64."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Room for ``tokens`` tokens of ``rows`` sequences, of which ``prefill_rows`` may have more than one token. In a
    decode step (``prefill_rows`` 0) each has one."""

    tokens: int
    rows: int
    prefill_rows: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.prefill_rows else f"decode of {self.rows}"


@dataclass(frozen=True)
class Ladder:
    """All buckets: decode steps of each row size, and mixed steps, prompts beside decoding rows, of each token size."""

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
        return self._mixed(self.token_sizes[-1]).prefill_rows

    def _mixed(self, tokens: int) -> Bucket:
        rows = min(tokens, self.max_rows)
        return Bucket(tokens, rows, min(max(1, tokens // TOKENS_PER_ROW), MAX_PREFILL_ROWS, rows))

    def all(self) -> list[Bucket]:
        """Every bucket, the smallest first."""
        return sorted([*(Bucket(r, r, 0) for r in self.row_sizes), *(self._mixed(t) for t in self.token_sizes)])

    def choose(self, decode_rows: int, prefill_tokens: int, prefill_rows: int) -> Bucket:
        """The smallest bucket that holds a step of this size; the scheduler's limits see to it that there is one."""
        if not prefill_tokens:
            rows = self.row_sizes[bisect_left(self.row_sizes, decode_rows)]
            return Bucket(rows, rows, 0)
        fitting = self.token_sizes[bisect_left(self.token_sizes, decode_rows + prefill_tokens) :]
        return next(b for b in map(self._mixed, fitting) if b.prefill_rows >= prefill_rows)


def doubling(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    """first, first * factor, … up to and including last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
