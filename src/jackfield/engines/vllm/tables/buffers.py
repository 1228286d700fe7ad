"""What a site reads and leaves in a pass: slots, stashes, and the rows that are kept.

In an eager pass each site has buffers of its own, which leave for the host at once. A CUDA graph writes to ones that
stay where they are; of these a copy is made when the replay is over, before the next one overwrites them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from jackfield.engines.vllm.tables.program import Keeper, Kept, Places
from jackfield.engines.vllm.tables.trail import Gathered, Snapshot
from jackfield.interleave.site import Site

if TYPE_CHECKING:
    from jackfield.engines.vllm.tables.tables import Tabled, Tables

Slots = np.ndarray[tuple[int], np.dtype[np.int32]]


class Launch(Protocol):
    """Runs one site's operations on the rows of a pass. `kept` are buffers by dtype; `rows` says what rows want."""

    def __call__(
        self,
        site: int,
        x: Tensor,
        residual: Tensor | None,
        slots: Tensor,
        kept: "dict[torch.dtype, Tensor]",
        stash: Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Owned:
    """A request's rows in a pass: `count` from `first` on, at positions from `position` on."""

    request: "Tabled"
    first: int
    count: int
    position: int

    def rows(self, keeper: Keeper) -> list[int]:
        """Those of them that are kept, and were not in an earlier pass."""
        start = max(self.request.seen, self.position)
        kept = keeper.selected.within(range(start, self.position + self.count))
        shift = self.first + start - self.position
        rows = [row + shift for row in kept]
        return rows[-1:] if keeper.reduce == "last" else rows


def none_of(rows: int) -> Slots:
    """Slots of rows that want nothing."""
    return np.full(rows, -1, np.int32)


def flat(x: Tensor, rows: int) -> Tensor:
    """[row, width]: models that come from transformers have a batch axis of 1 before it."""
    own = x[0] if x.ndim > 2 and x.shape[0] == 1 != rows else x
    return own.flatten(1)


class Buffers:
    """Those that stay, and the ways to make a pass's own."""

    def __init__(self, tables: "Tables", launch: Launch, known: Places) -> None:
        self._tables, self.launch, self._known = tables, launch, known
        self.width = max(known.widths.values())
        self._slots: Tensor | None = None
        self._said: bytes | None = None  # what the slots of the graphs hold
        self._stash = torch.empty(0)
        self._kept: dict[torch.dtype, Tensor] = {}
        self._used = set[torch.dtype]()
        self._first: dict[Kept, int] = {}
        self._starts: dict[tuple[Site, torch.dtype], int] = {}
        self._version = -1

    # -- of graphs

    def settle(self, rows: int) -> None:
        """Makes buffers for graphs of up to so many rows; those of an earlier `Columns.version` are let go."""
        device = self._tables.device
        if self._slots is None or len(self._slots) < rows:
            self._slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
            self._stash = torch.empty(rows, self.width, dtype=self._known.dtype, device=device)
            self._said, self._version = None, -1
        if self._version == self._tables.columns.version:
            return
        self._version = self._tables.columns.version
        self._starts = {}
        totals: dict[torch.dtype, int] = {self._known.dtype: 0, torch.float32: 0}
        for (site, dtype), width in self._tables.columns.widths.items():
            self._starts[site, dtype] = totals[dtype]
            totals[dtype] += width
        self._kept = {
            dtype: torch.empty(len(self._slots), max(1, total), dtype=dtype, device=device)
            for dtype, total in totals.items()
        }
        self._used = {dtype for dtype, total in totals.items() if total}
        self._first = self._tables.columns.firsts(self._starts)

    def say(self, slots: Slots) -> None:
        """Tells graphs what the rows of the next pass want."""
        assert self._slots is not None
        said = slots.tobytes()
        if said != self._said:
            self._said = said
            self._slots[: len(slots)].copy_(self.there(torch.from_numpy(slots)), non_blocking=True)

    def launch_static(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        """A site's launch on the buffers that stay: to be captured."""
        assert self._slots is not None
        rows = x.shape[0] if x.ndim == 2 else x.shape[-2]
        x, residual = flat(x, rows), None if residual is None else flat(residual, rows)
        own = {
            dtype: kept[:, self._starts.get((self._tables.sites[site], dtype), 0) :]
            for dtype, kept in self._kept.items()
        }
        self.launch(site, x, residual, self._slots, own, self._stash)

    def snapshot(self, rows: int) -> Snapshot:
        """What a replay has left behind, on its way to the host."""
        leaving = self._tables.leaving
        tensors = {
            dtype: leaving.host(kept[:rows].clone()) for dtype, kept in self._kept.items() if dtype in self._used
        }
        return Snapshot(tensors, self._first, leaving.done())

    def there(self, tensor: Tensor) -> Tensor:
        """A small tensor, from which a copy to the device does not wait."""
        return tensor.pin_memory() if self._tables.device.type == "cuda" else tensor


class TablePass:
    """One pass over rows that are in the tables."""

    def __init__(self, tables: "Tables", owned: Sequence[Owned], total: int) -> None:
        self._tables, self._owned, self.total = tables, owned, total
        self.slots = none_of(total)
        numbers = set[int]()
        for each in owned:
            for first, stop, number in each.request.runs(each.position, each.count):
                self.slots[each.first + first : each.first + stop] = number
                numbers.add(number)
        numbered = tables.recipes.numbered
        self.sites = frozenset(site for number in numbers for site in numbered[number].by_site)
        self._numbers = frozenset(tables.numbers[site] for site in self.sites)
        self._device_slots: Tensor | None = None
        self._stash: Tensor | None = None
        self._gathered: dict[int, Gathered] = {}
        self._keeps = any(each.request.program.keepers for each in owned)

    # -- an eager pass

    def tap(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        """What passes at a tap: done to at once."""
        if site not in self._numbers:
            return
        x, residual = flat(x, self.total), None if residual is None else flat(residual, self.total)
        tables, buffers = self._tables, self._buffers
        if self._device_slots is None or self._stash is None:
            self._device_slots = buffers.there(torch.from_numpy(self.slots)).to(tables.device, non_blocking=True)
            self._stash = x.new_empty(self.total, buffers.width)
        where = tables.sites[site]
        kept = {
            dtype: torch.empty(
                self.total, max(1, tables.columns.widths.get((where, dtype), 0)), dtype=dtype, device=x.device
            )
            for dtype in {x.dtype, torch.float32}
        }
        buffers.launch(site, x, residual, self._device_slots, kept, self._stash)
        if self._keeps:
            self._gather(where, kept)

    def _gather(self, site: Site, kept: dict[torch.dtype, Tensor]) -> None:
        """Sends what is kept at a site on its way: one transfer of rows, and one of sums."""
        wanted = [
            (number, keeper, each.rows(keeper))
            for number, each in enumerate(self._owned)
            for keeper in each.request.program.keepers
            if keeper.kept.site == site
        ]
        for dtype, buffer in kept.items():
            rows = [each for each in wanted if each[1].kept.dtype == dtype and each[1].reduce != "mean" and each[2]]
            sums = [each for each in wanted if each[1].kept.dtype == dtype and each[1].reduce == "mean" and each[2]]
            if rows:
                self._gather_rows(rows, buffer)
            if sums:
                self._gather_sums(sums, buffer)

    def _gather_rows(self, wanted: "list[tuple[int, Keeper, list[int]]]", buffer: Tensor) -> None:
        every = sorted({row for _, _, rows in wanted for row in rows})
        whole = len(every) == len(buffer)
        index = self._buffers.there(torch.tensor(every)).to(buffer.device, non_blocking=True)
        there = self._tables.leaving.host(buffer if whole else buffer[index])
        at = {row: place for place, row in enumerate(every)}
        for number, keeper, rows in wanted:
            first, column = at[rows[0]], self._tables.columns.first(keeper.kept)
            own = (
                there[first : first + len(rows)]
                if at[rows[-1]] - first == len(rows) - 1
                else there[[at[row] for row in rows]]
            )
            self._part(number).rows[keeper.kept] = own[:, column : column + keeper.kept.width]

    def _gather_sums(self, wanted: "list[tuple[int, Keeper, list[int]]]", buffer: Tensor) -> None:
        for number, keeper, rows in wanted:
            column = self._tables.columns.first(keeper.kept)
            index = self._buffers.there(torch.tensor(rows)).to(buffer.device, non_blocking=True)
            own = buffer[index, column : column + keeper.kept.width].float().sum(0)
            self._part(number).sums[keeper.kept] = self._tables.leaving.host(own), len(rows)

    def _part(self, number: int) -> Gathered:
        return self._gathered.setdefault(number, Gathered())

    # -- its end

    def end(self, *, replayed: bool) -> None:
        """The pass is over: what was kept belongs to the requests. `replayed`: a graph has done all of it."""
        if self._keeps and replayed:
            self._take_snapshot()
        elif self._gathered:
            event = self._tables.leaving.done()
            for number, part in self._gathered.items():
                part.event = event
                self._owned[number].request.trail.gathered(part)
        for each in self._owned:
            each.request.seen = max(each.request.seen, each.position + each.count)

    def _take_snapshot(self) -> None:
        snapshot = self._buffers.snapshot(self.total)
        for each in self._owned:
            if each.request.program.keepers:
                for row in range(max(0, each.request.seen - each.position), each.count):
                    each.request.trail.row(snapshot, each.first + row, each.position + row)

    @property
    def _buffers(self) -> Buffers:
        buffers: Any = self._tables.buffers
        assert buffers is not None
        return buffers
