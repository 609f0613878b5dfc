"""Sampling defaults that a model brings along."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from jaxserve.models.config import CheckpointError, load_generation_config

logger = logging.getLogger(__name__)

_FIELDS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
_NOT_SUPPORTED = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1}
"""Fields that would change the answer, and the values that do not."""


def sampling_defaults(model_directory: Path, generation_config: str) -> dict[str, Any]:
    """Fields of ``SamplingParams`` from a generation_config.json: the model's own (``auto``), none (``vllm``), or that
    of another directory. Logged, so that nobody wonders. Raises ``CheckpointError`` naming the file."""
    if generation_config == "vllm":
        return {}
    directory = model_directory if generation_config == "auto" else Path(generation_config)
    path = directory / "generation_config.json"
    if generation_config != "auto" and not path.is_file():
        raise CheckpointError(f"--generation-config: {path} does not exist")
    defaults: dict[str, Any] = {}
    for name, value in load_generation_config(directory).items():
        if value is not None and value != _NOT_SUPPORTED.get(name, value):
            logger.warning("%s: %s = %r is not supported yet and ignored", path, name, value)
        if name not in _FIELDS or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path}: {name} must be a number, got {value!r}")
        defaults[name] = _FIELDS[name](value)
    logger.info("sampling defaults: %s (generation_config.json)", defaults or "neutral")
    return defaults
