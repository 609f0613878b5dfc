"""Applies each mutation to a copy of the tree and runs the tests that carry its id: they must fail.

python -m tests.mutations             # all of them, which takes a while
python -m tests.mutations SC05 NU02
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.mutations import Mutation
from tests.mutations.catalogue import ROOT, files_by_id, known_mutations, mutated

LIMIT_SECONDS = 600
"""For the tests of one id; a mutation that makes them hang shows less than one that makes them fail."""
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".cache", ".hypothesis", "__pycache__", ".*_cache")
NOTICED = "noticed"


def main() -> int:
    known = known_mutations()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ids", nargs="*", type=str.upper, metavar="ID", help="only these [all]")
    ids = parser.parse_args().ids or sorted(known)
    if unknown := set(ids) - known.keys():
        parser.error(f"no mutation of {', '.join(sorted(unknown))}")
    files, survivors = files_by_id(), []
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        tree = copy_tree(Path(directory) / "tree")
        for name in ids:
            start = time.monotonic()
            verdict = try_mutation(name, known[name], tree, files.get(name, set()))
            print(f"{name}  {verdict}  ({time.monotonic() - start:.0f} s)", flush=True)
            if verdict != NOTICED:
                survivors.append(name)
    print(f"{len(ids) - len(survivors)} of {len(ids)} noticed" + "".join(f", {name} not" for name in survivors))
    return bool(survivors)


def copy_tree(to: Path) -> Path:
    """Without what no test needs; compiled programs are shared with the original."""
    shutil.copytree(ROOT, to, ignore=NOT_COPIED, symlinks=True)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (to / ".cache").symlink_to(ROOT / ".cache")
    return to


def try_mutation(name: str, mutation: Mutation, tree: Path, files: Iterable[str]) -> str:
    """What became of it, in words."""
    if not files:
        return "no test carries this id"
    path = tree / mutation.file
    original = path.read_text(encoding="utf-8")
    try:
        text = mutated(mutation, tree)
    except ValueError as error:
        return str(error)
    if (before := run_tests(name, tree, files)) != "passed":
        return f"its tests, without any mutation, {before}"
    path.write_text(text, encoding="utf-8")
    try:
        after = run_tests(name, tree, files)
    finally:
        path.write_text(original, encoding="utf-8")
    return NOTICED if after == "failed" else f"its tests {after}"


def run_tests(name: str, tree: Path, files: Iterable[str]) -> str:
    """How the tests of an id end in this tree: they passed, failed, or what else became of them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
        "-k",
        name.lower(),
    ]
    # No bytecode: it is told from its source's second and size, and a mutation may change neither.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *sorted(files)], cwd=tree, env=environment, capture_output=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_SECONDS} s"
    ends = {0: "passed", 1: "failed", 5: "were not selected"}
    return ends.get(done.returncode, f"could not run: {done.stdout.decode(errors='replace')[-500:]}")


if __name__ == "__main__":
    sys.exit(main())
