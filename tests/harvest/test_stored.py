"""Files in pieces are what safetensors reads, to the bit."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from jackfield.harvest import stored
from tests.harvest.prompts import numbers

DTYPES = {
    "float64": numbers(6, 3).double(),
    "float32": numbers(6, 3, seed=1),
    "float16": numbers(6, 3, seed=2).half(),
    "bfloat16": numbers(6, 3, seed=3).bfloat16(),
    "int64": torch.arange(6),
    "int32": torch.arange(6, dtype=torch.int32).view(6, 1, 1),
}


@pytest.mark.parametrize("cuts", [[6], [1, 2, 3], [0, 6], [6, 0]])
def test_pieces_are_joined(tmp_path: Path, cuts: list[int]) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        stored.write(file, {name: tensor.split(cuts) for name, tensor in DTYPES.items()})
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert set(read) == set(DTYPES)
    assert all(read[name].equal(tensor) and read[name].dtype == tensor.dtype for name, tensor in DTYPES.items())


def test_it_is_the_file_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in DTYPES.items() if name.startswith("float")}
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    with (tmp_path / "ours").open("wb") as file:
        stored.write(file, {name: [tensor] for name, tensor in tensors.items()})
    theirs, ours = ((tmp_path / name).read_bytes() for name in ("theirs", "ours"))
    data = sum(tensor.nbytes for tensor in tensors.values())
    assert ours[-data:] == theirs[-data:]
    assert (len(ours) - data) % 8 == 0


def test_pieces_that_are_parts_of_others(tmp_path: Path) -> None:
    whole = numbers(5, 8)
    with (tmp_path / "x").open("wb") as file:
        stored.write(file, {"x": [whole[1:3, ::2], whole[4:, 1::2]]})
    expected = torch.cat([whole[1:3, ::2], whole[4:, 1::2]])
    assert safetensors.torch.load_file(tmp_path / "x")["x"].equal(expected)
