"""Every notebook runs from a fresh kernel, and prints what it was committed with."""

import runpy
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from tests.docs.page import ROOT, agree

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
WITH_VLLM = {"engines"}
"""Those that start a vLLM: tests/engines/vllm runs them, with its settings."""
executed: Callable[[Path], nbformat.NotebookNode] = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))["executed"]


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell printed to stdout."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    streams = ([output.text for output in cell.outputs if output.get("name") == "stdout"] for cell in cells)
    return ["".join(stream) for stream in streams]


def pictures(notebook: nbformat.NotebookNode) -> int:
    """How many pictures it shows."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
# The kernel's process and its sockets are left to the garbage collector.
@pytest.mark.filterwarnings("default::ResourceWarning", "default::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in WITH_VLLM], ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path):
    committed, again = nbformat.read(path, as_version=4), executed(path)
    for new, old in zip(printed(again), printed(committed), strict=True):
        if not agree(new, old):
            assert new == old
    assert pictures(again) == pictures(committed) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_clean(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 500_000
    assert str(ROOT) not in path.read_text(encoding="utf-8")
    errors = [output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    assert errors == []
