"""Compilers' intermediate results, kept beside XLA's compiled programs.

A program is found there by its text, kernels and all, and to write a kernel down can take longer than the rest of the
way.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import jax


def kept(name: str, key: tuple[object, ...], sources: Iterable[Path], make: Callable[[], bytes]) -> bytes:
    """What ``make`` returns, from an earlier process where there was one with this ``key``, by its ``repr``, and these
    ``sources``, by what they hold: together all that the result depends on. Without a compilation cache
    (``jax_compilation_cache_dir``) nothing is kept."""
    if not jax.config.jax_compilation_cache_dir:
        return make()
    folder = Path(jax.config.jax_compilation_cache_dir) / "kernels"
    digest = hashlib.sha256(repr(key).encode())
    for source in sources:
        digest.update(source.read_bytes())
    path = folder / f"{name}-{digest.hexdigest()}"
    with suppress(OSError):
        return path.read_bytes()
    content = make()
    with suppress(OSError):  # a full disk, a cache for reading: the next process makes it again
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)  # whole, or not at all
    return content
