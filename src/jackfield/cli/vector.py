"""A vector, or several, out of a file that a user names."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import typer
from torch import Tensor


def read_vector(file: Path, option: str = "--steer") -> Tensor:
    """The one vector [d_model] in a .safetensors or .pt file, as float32 on the CPU.

    A .pt file is read without running its code.

    Raises:
        typer.BadParameter: no such file, not of these kinds, not one vector, or not finite.
    """
    return _tensor(file, option, "a vector [d_model]", (1,))


def read_directions(file: Path, option: str) -> Tensor:
    """The one tensor [n, d_model], or [d_model], in such a file, as `read_vector` reads it."""
    return _tensor(file, option, "directions [n, d_model]", (1, 2))


def _tensor(file: Path, option: str, wanted: str, axes: Collection[int]) -> Tensor:
    try:
        return _checked(file, _held(file), wanted, axes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _held(file: Path) -> object:
    readers: dict[str, Callable[[Path], object]] = {".safetensors": safetensors.torch.load_file, ".pt": _load_pt}
    if file.suffix not in readers:
        raise ValueError(f"{file} should end in {' or '.join(readers)}.")
    if not file.is_file():
        raise ValueError(f"there is no file {file}.")
    try:
        return readers[file.suffix](file)
    except Exception as error:  # of a torn file, torch's unpickler raises whatever it stumbles over
        raise ValueError(f"{file} cannot be read: {type(error).__name__}.") from None


def _load_pt(file: Path) -> object:
    return torch.load(file, map_location="cpu", weights_only=True)


def _checked(file: Path, held: object, wanted: str, axes: Collection[int]) -> Tensor:
    tensors: list[Any] = list(cast(dict[str, Any], held).values()) if isinstance(held, dict) else [held]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor):
        found = f"{len(tensors)} entries" if len(tensors) != 1 else f"a {type(tensors[0]).__name__}"
        raise ValueError(f"{file} should hold one tensor, and holds {found}.")
    tensor = tensors[0].detach().float()
    if tensor.ndim not in axes:
        raise ValueError(f"{file} should hold {wanted}, and holds a tensor of shape {list(tensor.shape)}.")
    if not tensor.isfinite().all():
        raise ValueError(f"{file} holds numbers that are not finite.")
    return tensor
