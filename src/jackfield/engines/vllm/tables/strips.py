"""What a request keeps, as it stands in a row of the buffers: values beside each other that are alike are one strip."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from jackfield.engines.vllm.tables.ops import Keeper, Kept
from jackfield.interventions.positions import Positions


@dataclass(frozen=True, slots=True)
class Strip:
    """Kept things in columns one after another, from `column` on, each `width` wide; a row of each has `shape`."""

    names: Sequence[str]
    positions: Positions
    dtype: torch.dtype
    column: int
    width: int
    shape: tuple[int, ...]


class Strips:
    """The strips of some keepers. Requests with the same keepers share them."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        self.are_all = all(keeper.reduce is None for keeper in keepers)
        """Whether every row is kept: a strip is nothing else."""
        self._first: Mapping[Kept, int] | None = None
        self._found: Sequence[Strip] = ()

    def of(self, first: Mapping[Kept, int]) -> Sequence[Strip]:
        """Where each kept thing begins at `first`, in the order of the keepers; found once for one such mapping."""
        if self._first is not first:
            placed = [(each, first[each.kept]) for each in self._keepers]
            # the same for neighbours: alike, and as far behind the run's beginning as their turn says
            key = [
                (each.positions, each.kept.dtype, each.kept.width, each.shape, column - turn * each.kept.width)
                for turn, (each, column) in enumerate(placed)
            ]
            runs = groupby(range(len(placed)), key.__getitem__)
            self._found = [_strip([placed[turn] for turn in run]) for _, run in runs]
            self._first = first
        return self._found


def _strip(run: Sequence[tuple[Keeper, int]]) -> Strip:
    keeper, column = run[0]
    names = [str(each.place) for each, _ in run]
    return Strip(names, keeper.positions, keeper.kept.dtype, column, keeper.kept.width, keeper.shape)
