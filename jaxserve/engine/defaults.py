"""Sampling defaults that a model brings along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve.models.config import CheckpointError, load_generation_config

_FIELDS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}


def sampling_defaults(model_directory: Path, generation_config: str) -> dict[str, Any]:
    """Fields of ``SamplingParams`` from a generation_config.json: the model's own (``auto``), none (``vllm``), or that
    of another directory. Raises ``CheckpointError`` naming the file."""
    if generation_config == "vllm":
        return {}
    directory = model_directory if generation_config == "auto" else Path(generation_config)
    path = directory / "generation_config.json"
    if generation_config != "auto" and not path.is_file():
        raise CheckpointError(f"--generation-config: {path} does not exist")
    defaults: dict[str, Any] = {}
    for name, value in load_generation_config(directory).items():
        if name not in _FIELDS or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path}: {name} must be a number, got {value!r}")
        defaults[name] = _FIELDS[name](value)
    return defaults
