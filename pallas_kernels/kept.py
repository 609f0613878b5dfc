"""Compilers' intermediate results, kept beside XLA's compiled programs.

A program is found there by its text, kernels and all, and to write a kernel down can take longer than the rest of the
way.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax


def kept(name: str, key: tuple[object, ...], make: Callable[[], bytes]) -> bytes:
    """What ``make`` returns, from an earlier process where there was one with this ``key``, whose ``repr`` says all
    that the result depends on. Without a compilation cache (``jax_compilation_cache_dir``) nothing is kept."""
    if not jax.config.jax_compilation_cache_dir:
        return make()
    folder = Path(jax.config.jax_compilation_cache_dir) / "kernels"
    path = folder / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()}"
    with suppress(FileNotFoundError):
        return path.read_bytes()
    content = make()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)  # whole, or not at all
    return content
