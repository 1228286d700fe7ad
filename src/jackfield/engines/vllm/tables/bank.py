"""The device's memory of recipes: vectors, operations, and per recipe and site the range of its operations.

All of it has a fixed size and place, as CUDA graphs need it. What two recipes have in common they share: a vector is
known by its contents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.ops import BANK, COLUMN, FIELDS, SCALE, Act, Numbers, Part
from jackfield.interleave.site import Site


class Room:
    """What is free of so many places in a row."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]  # (first, how many), ascending

    def take(self, size: int) -> int | None:
        """The first of `size` places that nobody has; None where there are not so many together."""
        for index, (first, count) in enumerate(self._free):
            if count >= size:
                rest = [(first + size, count - size)] if count > size else []
                self._free[index : index + 1] = rest
                return first
        return None

    def give(self, first: int, size: int) -> None:
        """Places that are not needed any more."""
        joined: list[tuple[int, int]] = []
        for start, count in sorted([*self._free, (first, size)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + count
            else:
                joined.append((start, count))
        self._free = [each for each in joined if each[1]]


@dataclass(slots=True)
class _Vectors:
    first: int
    size: int
    uses: int = 0


@dataclass(slots=True)
class Entry:
    """Where a recipe is: its number, its operations, and the vectors that it uses."""

    number: int
    first: int
    count: int
    vectors: list[Numbers] = field(default_factory=list[Numbers])


class Table:
    """A fixed tensor on the device, and what was written to it on the host since the last pass."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.there = torch.zeros(shape, dtype=dtype, device=device)
        self._written: list[tuple[int, Tensor]] = []

    def write(self, first: int, rows: Tensor) -> None:
        """Rows from `first` on."""
        self._written.append((first, rows))

    def send(self) -> None:
        """In the order of the stream: passes that run have the old contents, later ones the new.

        And in the order in which they were written, as places are given back and taken again; one copy per run of rows.
        """
        written, self._written = self._written, []
        while written:
            stop, count = written[0][0], 0
            for first, rows in written:
                if first != stop:
                    break
                stop, count = first + len(rows), count + 1
            rows = torch.cat([rows for _, rows in written[:count]])
            here = rows.pin_memory() if self.there.is_cuda else rows
            self.there[written[0][0] : stop].copy_(here, non_blocking=True)
            written = written[count:]


class Bank:
    """Fixed tensors on the device, and what is free of them."""

    def __init__(
        self, sites: Mapping[Site, int], device: torch.device, *, numbers: int, ops: int, recipes: int
    ) -> None:
        self._sites = sites
        self._tables = (
            Table((numbers,), torch.float32, device),
            Table((ops, FIELDS), torch.int32, device),
            Table((recipes, len(sites), 2), torch.int32, device),
        )
        self.numbers, self.ops, self.ranges = (table.there for table in self._tables)
        self._numbers, self._ops, self._recipes = Room(numbers), Room(ops), Room(recipes)
        self._vectors: dict[Numbers, _Vectors] = {}

    def send(self) -> None:
        """What recipes have brought since the last pass goes to the device."""
        for table in self._tables:
            table.send()

    def add(self, part: Part, acts: Sequence[Act], columns: Columns) -> Entry | None:
        """Puts operations and their numbers into the tables. None where one of them is full; nothing is taken then."""
        number, first = self._recipes.take(1), self._ops.take(len(part.flat))
        if number is None or first is None:
            if number is not None:
                self._recipes.give(number, 1)
            if first is not None:
                self._ops.give(first, len(part.flat))
            return None
        entry = Entry(number, first, len(part.flat))
        places = [self._placed(act, entry) for act in acts]
        if None in places:
            self.remove(entry)
            return None
        rows = part.encoded.copy()
        rows[:, BANK] = np.array(places, np.int32)[part.acts]
        rows[:, SCALE] = np.array([act.scale for act in acts], np.float32).view(np.int32)[part.acts]
        rows[:, COLUMN] = [columns.of(op) for op in part.flat] if columns.widths else 0
        ends = first + np.cumsum(part.counts)
        ranges = np.zeros((len(self._sites), 2), np.int32)
        ranges[[self._sites[site] for site in part.by_site]] = np.stack([ends - part.counts, ends], 1)
        self._tables[1].write(first, torch.from_numpy(rows))
        self._tables[2].write(number, torch.from_numpy(ranges)[None])
        return entry

    def remove(self, entry: Entry) -> None:
        """The recipe is not needed any more. Its rows stay as they are: no slot says its number."""
        self._recipes.give(entry.number, 1)
        self._ops.give(entry.first, entry.count)
        for key in entry.vectors:
            vectors = self._vectors[key]
            vectors.uses -= 1
            if not vectors.uses:
                self._numbers.give(vectors.first, vectors.size)
                del self._vectors[key]

    def _placed(self, act: Act, entry: Entry) -> int | None:
        """Where the numbers of an intervention are: its vectors, and a bias for each behind them."""
        key = act.numbers
        if key is None:
            return 0
        if key not in self._vectors:
            wanted = torch.cat([key.vectors.reshape(-1), key.bias])
            first = self._numbers.take(len(wanted))
            if first is None:
                return None
            self._tables[0].write(first, wanted)
            self._vectors[key] = _Vectors(first, len(wanted))
        self._vectors[key].uses += 1
        entry.vectors.append(key)
        return self._vectors[key].first
