"""What is done to a row at a tap: operations on columns of it, in order.

An `Op` is what the kernel and its double in torch carry out, one after another, for each row that it is meant for. It
says where and of which kind; the numbers stand apart, in the `Act` of its intervention, as they differ from request to
request where all else is the same.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from torch import Tensor

from jackfield.interleave.site import Site
from jackfield.interventions.places import Place
from jackfield.interventions.positions import Positions


class Kind(IntEnum):
    """What an operation does to its columns of the row."""

    STEER = 0
    STEER_RELATIVE = 1
    PROJECT = 2
    SCALE = 3
    REPLACE = 4
    CAPTURE = 5
    PROBE = 6
    STASH = 7
    RESTORE = 8


EDITS: Final = frozenset({Kind.STEER, Kind.STEER_RELATIVE, Kind.PROJECT, Kind.SCALE, Kind.REPLACE, Kind.RESTORE})


@dataclass(frozen=True, slots=True)
class Kept:
    """What a row leaves behind: `width` numbers of `dtype`, in columns that requests who keep the same share."""

    place: str
    site: Site
    width: int
    dtype: torch.dtype
    columns: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Numbers:
    """What an operation multiplies rows with: `vectors` [n, width] and `bias` [n], float32. Known by its contents."""

    vectors: Tensor
    bias: Tensor
    digest: bytes

    @classmethod
    def of(cls, vectors: Tensor, bias: Tensor | None = None) -> "Numbers":
        """Of vectors [n, width] and a bias [n], which is 0 where none is given; both on the CPU."""
        wide = vectors.float().cpu().contiguous()
        own = torch.zeros(len(wide)) if bias is None else bias.float().cpu().contiguous()
        digest = hashlib.blake2b(wide.numpy().tobytes(), digest_size=16)
        digest.update(own.numpy().tobytes())
        return cls(wide, own, digest.digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.vectors.shape == other.vectors.shape and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class Act:
    """The numbers of one intervention."""

    scale: float = 0.0
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One operation at one site, on `width` columns from `start` on.

    `summed`: of the row that is the sum of both halves. `act` counts the interventions that its numbers are of, `count`
    are their vectors. `column` counts from the first column of `kept`.
    """

    kind: Kind
    site: Site
    summed: bool
    start: int
    width: int
    act: int
    count: int = 0
    kept: Kept | None = None
    column: int = 0


@dataclass(frozen=True, slots=True)
class Keeper:
    """One entry of `Result.saved`: rows of `shape` at these positions, or what `reduce` makes of them."""

    kept: Kept
    place: Place
    shape: tuple[int, ...]
    reduce: str | None
    positions: Positions


FIELDS: Final = 8
"""Whole numbers of an operation: kind and whether summed, start, width, place in the bank, count, column, scale, -."""
SUMMED: Final = 16
BANK, COLUMN, SCALE = 3, 5, 6


class Part:
    """Those operations of a form that rows at some positions want, site after site, and as the kernel reads them."""

    def __init__(self, ops: Mapping[Site, list[Op]]) -> None:
        self.by_site = ops
        self.flat = [op for those in ops.values() for op in those]
        self.acts = np.array([op.act for op in self.flat], np.int64)
        self.encoded = np.array([_encoded(op) for op in self.flat], np.int32).reshape(-1, FIELDS)
        self.counts = [len(those) for those in ops.values()]


def _encoded(op: Op) -> list[int]:
    """All but what depends on the tables: the place in the bank, the column, the scale."""
    return [int(op.kind) + (SUMMED if op.summed else 0), op.start, op.width, 0, op.count, 0, 0, 0]
