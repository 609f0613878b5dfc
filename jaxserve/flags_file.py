"""``--config FILE``: flags written down as YAML, ``max-model-len: 8192`` and so on, as vLLM reads them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml


def with_flags_file(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The command line with the flags of its ``--config`` file in front, so that what it says itself wins.

    Raises ``ValueError`` naming the file, and the key that is at fault.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, rest = finder.parse_known_args(argv)
    return argv if found.config is None else [*_flags(Path(found.config), parser), *rest]


def _flags(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold a mapping of flags to values")
    known = {name: action for action in parser._actions for name in action.option_strings}
    flags: list[str] = []
    for key, value in values.items():
        flag = f"--{str(key).replace('_', '-')}"
        if flag not in known or flag in ("--config", "--help", "--version"):
            raise ValueError(f"--config {path}: {key} is not a flag")
        if value is False and f"--no-{flag[2:]}" in known:
            flags.append(f"--no-{flag[2:]}")
        elif value is not None and value is not False:
            flags += [flag, *_values(known[flag], value)]
    return flags


def _values(action: argparse.Action, value: Any) -> list[str]:
    """What would follow the flag on a command line."""
    if value is True:
        return []
    if isinstance(value, list) and action.nargs is not None:
        return [str(item) for item in value]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [",".join(map(str, value)) if isinstance(value, list) else str(value)]
