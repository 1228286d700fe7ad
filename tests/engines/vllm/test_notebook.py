"""The notebook that does the same work on transformers and on vLLM, where one word is different.

It runs in a kernel, which is a process of its own. What it found is kept by a cell more, and held against the contract
here: the notebook's own words about it are not taken for it.
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from tests.docs.page import ROOT, agree
from tests.docs.test_notebooks import executed, pictures, printed
from tests.engines.vllm.tiny import ENVIRONMENT, need_vllm
from tests.reference.compare import assert_close

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "docs" / "notebooks" / "engines.ipynb"
TEXTS = ("plain", "steered", "without heads", "without a layer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def again(folder: Path) -> Generator[nbformat.NotebookNode]:
    """The notebook after a run, with its last cell: vLLM compiles with no more than the graph's tracer there."""
    need_vllm()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(f"torch.save(found, {str(folder / 'found.pt')!r})"))
    nbformat.write(notebook, folder / "engines.ipynb")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**ENVIRONMENT, "VLLM_CPU_CI_ENV": "1", "OMP_NUM_THREADS": "1"}.items():
            patched.setenv(name, value)
        patched.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        yield executed(folder / "engines.ipynb")


@pytest.fixture(scope="module")
def found(again: nbformat.NotebookNode, folder: Path) -> Any:
    """What the work came to on each engine."""
    return torch.load(folder / "found.pt")


def test_it_prints_what_it_was_committed_with(again: nbformat.NotebookNode) -> None:
    committed = nbformat.read(NOTEBOOK, as_version=4)
    for new, old in zip(printed(again)[:-1], printed(committed), strict=True):
        if not agree(new, old):
            assert new == old
    assert pictures(again) == pictures(committed) > 0


def test_patterns_and_streams_are_those_of_transformers(found: Any) -> None:
    """Kills: a pattern of other keys than the request's, a half of the stream, a row that is another prompt's."""
    for prompt, reference in zip(found["vllm"]["looks"], found["transformers"]["looks"], strict=True):
        assert len(prompt) == 6
        for step, (got, want) in enumerate(zip(prompt, reference, strict=True)):
            assert got[0].shape[:2] == (30, 9)
            assert_close(got[0], want[0], "attention_probabilities", where=f"step {step}, ")
            for layer, (mine, theirs) in enumerate(zip(got[1], want[1], strict=True)):
                assert_close(mine[None], theirs[None], "layer_output", where=f"step {step}, layer {layer}, ")


def test_edited_texts_are_those_of_transformers(found: Any) -> None:
    """Kills: an edit that is dropped, on either engine; a skip, or an edited head, that reaches another prompt."""
    for name in TEXTS:
        assert found["vllm"][name] == found["transformers"][name]
        assert name == "plain" or found["vllm"][name] != found["vllm"]["plain"]
