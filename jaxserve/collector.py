"""Python's collector of cyclic garbage, kept from stopping steps: with jax loaded, a full look takes 0.2 s.

From Python 3.14 on it looks at old objects a few at a time, whatever it is told here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30


def freeze() -> None:
    """What was made so far lives as long as the process: it is not looked at again."""
    gc.collect()
    gc.freeze()


@contextmanager
def only_young() -> Iterator[None]:
    """Look at new objects only, meanwhile, in all of the process: cycles that got old are garbage until the end."""
    young, middle, old = gc.get_threshold()
    if old != NEVER:  # else somebody else's block is open, and its end is the end of both
        gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        if old != NEVER:
            gc.set_threshold(young, middle, old)
