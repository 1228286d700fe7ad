"""A vector out of a file that a user names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import typer
from torch import Tensor


def read_vector(file: Path) -> Tensor:
    """The one vector in a .safetensors or .pt file, as float32 on the CPU. A .pt file is read without running its code.

    Raises:
        typer.BadParameter: no such file, not of these kinds, not one vector, or not finite.
    """
    readers: dict[str, Callable[[Path], object]] = {".safetensors": safetensors.torch.load_file, ".pt": _load_pt}
    if file.suffix not in readers:
        raise _refused(f"{file} should end in {' or '.join(readers)}.")
    if not file.is_file():
        raise _refused(f"there is no file {file}.")
    try:
        held = readers[file.suffix](file)
    except Exception as error:  # of a torn file, torch's unpickler raises whatever it stumbles over
        raise _refused(f"{file} cannot be read: {type(error).__name__}.") from None
    return _one_vector(file, held)


def _load_pt(file: Path) -> object:
    return torch.load(file, map_location="cpu", weights_only=True)


def _one_vector(file: Path, held: object) -> Tensor:
    tensors: list[Any] = list(cast(dict[str, Any], held).values()) if isinstance(held, dict) else [held]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor):
        found = f"{len(tensors)} entries" if len(tensors) != 1 else f"a {type(tensors[0]).__name__}"
        raise _refused(f"{file} should hold one tensor, and holds {found}.")
    vector = tensors[0].detach().float()
    if vector.ndim != 1:
        raise _refused(f"{file} should hold a vector [d_model], and holds a tensor of shape {list(vector.shape)}.")
    if not vector.isfinite().all():
        raise _refused(f"{file} holds a vector that is not finite.")
    return vector


def _refused(why: str) -> typer.BadParameter:
    return typer.BadParameter(why, param_hint="--steer")
