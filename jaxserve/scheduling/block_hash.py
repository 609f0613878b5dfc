"""Names of full KV blocks: equal names mean equal tokens from the very beginning, and equal circumstances.

A block's name is the BLAKE2b digest of the name before it and of its own token ids, so that it stands for the whole
prefix. The first of a chain stands for what else the KV depends on (an adapter) or must be kept apart by (a salt).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


def root_name(**circumstances: str) -> bytes:
    """The name before a chain's first block. Each circumstance goes in with its own tag and both their lengths, so that
    no value can pass for another tag's, nor two for one."""
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"root")
    for tag, value in sorted(circumstances.items()):
        for part in (tag.encode(), value.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def block_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block of these tokens that follows ``parent``."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
