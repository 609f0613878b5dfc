"""Attention shapes that tests and benchmarks share: whatever runs a new implementation runs all of these."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class AttentionShape:
    """The batch of one call. A sequence of length 0 is padding."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    """How many of a sequence's last tokens are queries; in decode it is always one."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    padding_tokens: int = 0
    """Queries of nobody behind the last sequence's."""
    leading_tokens: int = 0
    """Queries of nobody before the first sequence's."""

    @property
    def num_tokens(self) -> int:
        return self.leading_tokens + sum(self.query_lens) + self.padding_tokens

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        return tuple(accumulate(self.query_lens, initial=self.leading_tokens))

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks that each sequence fills, the last one partly."""
        return tuple(-(-length // self.block_size) for length in self.seq_lens)


def _decode(*seq_lens: int, **options: int) -> AttentionShape:
    return AttentionShape(seq_lens, (1,) * len(seq_lens), **options)


def _prefill(*chunks: tuple[int, int], **options: int) -> AttentionShape:
    """From pairs: queries, and the sequence's length with them."""
    query_lens, seq_lens = zip(*chunks, strict=True)
    return AttentionShape(seq_lens, query_lens, **options)


_EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257)
"""Lengths around the edges of blocks, and of the stretches of keys that implementations take at a time."""

DECODE: dict[str, AttentionShape] = {
    "one": _decode(5),
    "gqa": _decode(*_EDGES, num_heads=8),
    "mqa": _decode(*_EDGES, num_kv_heads=1, head_dim=64),
    "mha": _decode(*_EDGES, num_kv_heads=4, head_dim=48),
    "head-128": _decode(3, 40, 130, num_heads=8, head_dim=128, block_size=32),
    "block-8": _decode(*_EDGES, block_size=8),
    "block-32": _decode(*_EDGES, block_size=32),
    "block-128": _decode(*_EDGES, block_size=128),
    "window": _decode(*_EDGES, 1000, window=16),
    "window-1": _decode(*_EDGES, window=1),
    "window-over-chunks": _decode(*_EDGES, 300, window=130, block_size=8),
    "window-beyond": _decode(*_EDGES, window=4096),
    "padding": _decode(0, 7, 0, 140, 0, 0),
    "padding-window": _decode(0, 7, 0, 140, 0, 0, window=20),
    "all-padding": _decode(0, 0),
}
PREFILL: dict[str, AttentionShape] = {
    "one": _prefill((1, 1)),
    "whole": _prefill((150, 150), num_heads=8),
    "ragged": _prefill((1, 1), (31, 31), (32, 32), (33, 33), (2, 2), (65, 65)),
    "chunks": _prefill((16, 48), (2, 130), (33, 128), (7, 129), (1, 257)),
    "mqa": _prefill((40, 40), (20, 150), num_kv_heads=1, head_dim=64),
    "mha": _prefill((40, 40), (20, 150), num_kv_heads=4, head_dim=48),
    "head-128": _prefill((12, 12), (35, 140), num_heads=8, head_dim=128, block_size=32),
    "block-8": _prefill((9, 9), (40, 136), block_size=8),
    "block-128": _prefill((9, 9), (40, 136), block_size=128),
    "window": _prefill((70, 70), (3, 17), (40, 300), window=16),
    "window-1": _prefill((9, 9), (33, 129), window=1),
    "window-over-chunks": _prefill((40, 300), (150, 150), window=130, block_size=8),
    "window-beyond": _prefill((40, 300), (9, 9), window=4096),
    "padding": _prefill((5, 5), (40, 130), (0, 0), (0, 0), padding_tokens=19),
    "padding-window": _prefill((5, 5), (40, 130), (0, 0), (0, 0), padding_tokens=19, window=20),
    "leading": _prefill((5, 5), (40, 130), padding_tokens=3, leading_tokens=35),
    "all-padding": _prefill((0, 0), (0, 0), padding_tokens=16),
}
