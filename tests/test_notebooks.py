"""The notebooks run from top to bottom, draw their pictures, and are committed without outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import COMPILATION_CACHE, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {"01_step_the_engine": 8}
"""How many a notebook draws at least; one where nothing is said."""


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.fixture
def kernel_environment(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a kernel inherits: a tiny model, the tests' compilation cache, and folders of its own for Jupyter."""
    monkeypatch.setenv("JAXSERVE_NOTEBOOK_MODEL", str(checkpoint("tiny-llama-3.1")))
    assert COMPILATION_CACHE.name == "xla"
    monkeypatch.setenv("JAXSERVE_CACHE", str(COMPILATION_CACHE.parent))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


@pytest.mark.usefixtures("kernel_environment")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_draws(path: Path) -> None:
    notebook = read(path)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= PICTURES.get(path.stem, 1)
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_clean(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
