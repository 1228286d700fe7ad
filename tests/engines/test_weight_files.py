"""What is wrong with a folder of weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jackfield.engines.weight_files import unreadable

WEIGHTS = {"x": torch.ones(200)}


def written(folder: Path, name: str, *, old: bool = False, keep: float = 1.0) -> Path:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=not old)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    return path


@pytest.mark.parametrize("old", [False, True], ids=["zip", "older"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "consolidated.00.pth"])
def test_files_that_are_whole_can_be_read_and_cut_ones_cannot(tmp_path: Path, name: str, old: bool) -> None:
    written(tmp_path, name, old=old)
    assert unreadable(tmp_path) is None
    for keep in (0.9, 0.5, 0.0):
        written(tmp_path, name, old=old, keep=keep)
        assert (unreadable(tmp_path) or "").startswith(f"{name} is broken: ")


def test_nothing_but_what_training_leaves(tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt"):
        (tmp_path / name).write_text("something else")
    assert (unreadable(tmp_path) or "").startswith("it holds no weights (*.safetensors, *.bin")
    written(tmp_path, "model.safetensors")
    assert unreadable(tmp_path) is None


def test_where_there_are_safetensors_nothing_else_is_looked_at(tmp_path: Path) -> None:
    written(tmp_path, "model.safetensors")
    written(tmp_path, "pytorch_model.bin", keep=0.5)
    assert unreadable(tmp_path) is None


def test_an_index(tmp_path: Path) -> None:
    written(tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert (unreadable(tmp_path) or "").startswith("model.safetensors.index.json is broken: Expecting")
