"""What mutations there are, and which tests carry an id."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from pathlib import Path

from tests import mutations
from tests.mutations import Mutation

ROOT = Path(__file__).parent.parent.parent
TEST_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


def known_mutations() -> dict[str, Mutation]:
    """Of all tables; ``ValueError`` for an id that two of them have."""
    known: dict[str, Mutation] = {}
    for module in pkgutil.iter_modules(mutations.__path__, f"{mutations.__name__}."):
        # Neither the runner nor tests are imported only to see that they have no table.
        if module.name.rpartition(".")[2].startswith(("__", "test_", "catalogue")):
            continue
        table: dict[str, Mutation] = import_module(module.name).MUTATIONS
        if twice := known.keys() & table.keys():
            raise ValueError(f"in two tables: {', '.join(sorted(twice))}")
        known |= table
    return known


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The file's text with the mutation in it; ``ValueError`` if its old text is not there exactly once."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    if (times := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file} holds the old text {times} times: {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def files_by_id() -> dict[str, set[str]]:
    """By id, in upper case, the files with tests that carry it in their names, from the root of the tree."""
    files: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in TEST_NAME.findall(path.read_text(encoding="utf-8")):
            for part in name.split("_"):
                if re.fullmatch(r"[a-z]{2}\d{2}", part):
                    files.setdefault(part.upper(), set()).add(str(path.relative_to(ROOT)))
    return files
