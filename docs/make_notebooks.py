"""Run the notebooks and keep what they show: `python docs/make_notebooks.py [NAME.ipynb ...]`."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).with_name("notebooks")


def executed(notebook: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run, and nothing in it that differs between machines."""
    node = nbformat.read(notebook, as_version=4)
    NotebookClient(node, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
    node.metadata = nbformat.from_dict(
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    )
    for cell in node.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = _tidy(cell.outputs)
    return node


def _tidy(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Without what was said on stderr, which is about the machine, and with what was printed in one piece."""
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    rest = [output for output in outputs if output.output_type != "stream"]
    return [nbformat.v4.new_output("stream", name="stdout", text=printed), *rest] if printed else rest


if __name__ == "__main__":
    for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
