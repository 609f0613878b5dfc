"""``--config FILE``: flags written down as YAML, ``max-model-len: 8192`` and so on, as vLLM reads them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import yaml


class FlagsFile:
    """The ``--config`` file of a command line, if it names one. What the command line says itself wins.

    Raises ``ValueError`` naming the file, and the key that is at fault.
    """

    def __init__(self, argv: list[str], parser: argparse.ArgumentParser) -> None:
        finder = type(parser)(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        found, rest = finder.parse_known_args(argv)
        self._path: str | None = found.config
        self._actions = {name: action for action in parser._actions for name in action.option_strings}
        self._keys: dict[str, str] = {}
        self.argv = argv if self._path is None else [*self._flags(Path(self._path), rest), *rest]
        """The flags of the file and of the command line."""

    def origin(self, error: str) -> str:
        """Where the flag that an error names first was set, to put in front: nothing unless in the file."""
        flag = re.search(r"--[a-z-]+", error)
        action = self._actions.get(flag[0]) if flag else None
        key = self._keys.get(action.dest) if action else None
        return f"--config {self._path}: {key}: " if key else ""

    def _flags(self, path: Path, argv: list[str]) -> list[str]:
        try:
            values = yaml.safe_load(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ValueError(f"--config {path} must hold a mapping of flags to values")
        given = {action.dest for word in argv if (action := self._actions.get(word.split("=")[0]))}
        flags: list[str] = []
        for key, value in values.items():
            flag = f"--{str(key).replace('_', '-')}"
            action = self._actions.get(flag)
            if action is None or flag in ("--config", "--help", "--version"):
                raise ValueError(f"--config {path}: {key} is not a flag")
            if value is None or action.dest in given:
                continue
            self._keys[action.dest] = str(key)
            if action.nargs != 0:
                flags += _with_values(flag, action, value)
            elif not isinstance(value, bool):
                raise ValueError(f"--config {path}: {key} must be true or false, got {value!r}")
            elif value:
                flags.append(flag)
            elif (opposite := f"--no-{flag[2:]}") in self._actions:
                flags.append(opposite)
        return flags


def _with_values(flag: str, action: argparse.Action, value: Any) -> list[str]:
    """What a command line would say."""
    if isinstance(value, list):
        texts = [str(item) for item in value]
        return [flag, *texts] if action.nargs is not None else [f"{flag}={','.join(texts)}"]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict | bool) else value}"]
