"""Sampling defaults that a model brings along."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.models.config import (
    CheckpointError,
    load_generation_config,
    load_model_config,
    resolve_max_model_len,
)
from jaxserve.request import SamplingParams

logger = logging.getLogger(__name__)

_FIELDS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
_NOT_SUPPORTED = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1}
"""Fields that would change the answer, and the values that do not."""


def check_model(config: EngineConfig, directory: Path) -> None:
    """What can be said of a model without loading it, before any process is started.

    Raises ``CheckpointError`` or ``ValueError``, one line, for a model or a limit that cannot be served.
    """
    resolve_max_model_len(config.max_model_len, load_model_config(directory))
    _checked(config.override_generation_config or {})


def sampling_defaults(
    model_directory: Path, generation_config: str, override: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Fields of ``SamplingParams`` from a generation_config.json: the model's own (``auto``), none (``vllm``), or that
    of another directory; ``override`` goes before them. Logged, so that nobody wonders.

    Raises ``CheckpointError`` naming the file, ``ValueError`` for an override that can never work.
    """
    defaults = {**_from_file(model_directory, generation_config), **_checked(override or {})}
    logger.info("sampling defaults: %s", defaults or "neutral")
    return defaults


def _checked(override: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := override.keys() - _FIELDS:
        raise ValueError(f"--override-generation-config: {min(unknown)} is not supported, {', '.join(_FIELDS)} are")
    try:
        msgspec.convert(dict(override), SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"--override-generation-config: {error}") from None
    return dict(override)


def _from_file(model_directory: Path, generation_config: str) -> dict[str, Any]:
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
    return defaults
