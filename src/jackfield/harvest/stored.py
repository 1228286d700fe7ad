"""A safetensors file out of pieces, which are written one after another and never joined in memory.

The format is eight bytes with the header's length, the header in JSON, and the tensors' bytes, little-endian, without
gaps (https://github.com/huggingface/safetensors, "Format"). Whatever reads safetensors reads it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from jackfield.errors import HarvestError, InvalidRequest, near

CODES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
    }
)
FLOATING: Final = ("float32", "bfloat16", "float16", "float64")
HEADER_ALIGNMENT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """What a row of a tensor is: its dtype by torch's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor) -> "Stored":
        """Of [row, ...]."""
        return cls(str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))


def parse_dtype(given: object) -> torch.dtype | None:
    """A floating dtype to store in, or None for that of each value; InvalidRequest for anything else."""
    name = str(given).removeprefix("torch.")
    if given is None:
        return None
    if name not in FLOATING or not isinstance(given, str | torch.dtype):
        raise InvalidRequest(f"dtype={given!r}: write {', '.join(FLOATING)}, or None.{near(name, FLOATING)}")
    return getattr(torch, name)


def cast(rows: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Floating rows in `dtype`. HarvestError for a number that it cannot hold."""
    if dtype is None or not rows.is_floating_point():
        return rows
    stored = rows.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(rows.dtype).max and stored.isinf().sum() > rows.isinf().sum():
        most = rows[rows.isfinite()].abs().max()
        raise HarvestError(f"{most:.4g} is more than dtype={str(dtype).removeprefix('torch.')!r} holds.")
    return stored


def write(file: BinaryIO, tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """Writes tensors [row, ...], each given as one piece or more that are to be joined along the first axis."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))  # so that each begins aligned
    header: dict[str, Any] = {}
    end = 0
    for name in ordered:
        start, end = end, end + sum(piece.nbytes for piece in tensors[name])
        header[name] = {**_described(tensors[name]), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        for piece in tensors[name]:
            data: Any = piece.contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(data))


def _described(pieces: Sequence[Tensor]) -> dict[str, Any]:
    rows = sum(len(piece) for piece in pieces)
    return {"dtype": CODES[pieces[0].dtype], "shape": [rows, *pieces[0].shape[1:]]}
