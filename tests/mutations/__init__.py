"""One-line mutations of our code that a named test must notice.

A test whose name carries the id of a reported trouble (``test_sc05_...``) is there to fail when that comes back. Each
table ``MUTATIONS`` in this package brings it back on purpose, by id, and ``python -m tests.mutations [ID ...]`` tries
them one after another in a copy of the tree.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A change of one file that its id's tests must not survive."""

    file: str
    """From the root of the tree."""
    old: str
    """Occurs exactly once there."""
    new: str
