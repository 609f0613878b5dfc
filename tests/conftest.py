"""Shared fixtures: tiny checkpoints and engines, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxserve.engine.llm import LLM
from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parent.parent
COMPILATION_CACHE = ROOT / ".cache" / os.environ.get("PYTEST_XDIST_WORKER", "") / "xla"
"""One for all tests of a worker and their server processes, kept between runs. Not one for all workers, since jax does
not write its entries atomically."""

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "row_buckets": (1, 4),
    "token_buckets": (32, 64),
    "num_gpu_blocks_override": 129,
    "compilation_cache_dir": str(COMPILATION_CACHE),
}
"""Options of an engine that compiles few and small programs. Changes to it cost 10 to 20 s of compiling each, so that
tests share those that follow."""
ONE_CHUNK: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 2,
    "row_buckets": (2,),
    "max_num_batched_tokens": 128,
    "token_buckets": (128,),
}
"""Changes for lone runs: two forward programs, a whole prompt in one chunk."""
SCARCE: dict[str, Any] = {"num_gpu_blocks_override": 12, "row_buckets": (4,)}
"""Changes for preemption: blocks for one or two of the sequences that there are slots for."""
SMALL_CHUNKS: dict[str, Any] = {
    "block_size": 8,
    "max_num_batched_tokens": 32,
    "token_buckets": (8, 32),
    "row_buckets": (4,),
}
"""Changes for prompts in many chunks and blocks."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny checkpoint by name; do not change what is in it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def llm(checkpoint: Callable[[str], Path]) -> Callable[..., LLM]:
    """An LLM of a tiny checkpoint, with ``SMALL`` options and changes; equal calls share one. Leave it idle."""
    made: dict[Any, LLM] = {}

    def get(name: str, **changes: Any) -> LLM:
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = LLM(checkpoint(name), **{**SMALL, **changes})
        return made[key]

    return get
