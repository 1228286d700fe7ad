"""What a site reads and leaves in a pass: slots, stashes, and the rows that are kept.

In an eager pass each site has buffers of its own, which leave for the host at once. A CUDA graph writes to ones that
stay where they are; of these a copy is made when the replay is over, before the next one overwrites them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.ops import Keeper, Kept
from jackfield.engines.vllm.tables.program import Places
from jackfield.engines.vllm.tables.trail import Chunk, Cut, Gathered
from jackfield.interleave.site import Site
from jackfield.interventions.positions import Positions, Rows

if TYPE_CHECKING:
    from jackfield.engines.vllm.tables.tables import Tabled, Tables

SMALL_BYTES: Final = 2**28
"""Up to where the rows that a pass keeps of all sites stand beside each other on the device."""
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


@dataclass(slots=True)  # not frozen: there is one of a request and pass, and to make it would take three times as long
class Owned:
    """A request's rows in a pass: `count` from `first` on, at positions from `position` on."""

    request: "Tabled"
    first: int
    count: int
    position: int

    def rows(self, positions: Positions, *, last: bool) -> Rows:
        """Those of them that are meant and were not in an earlier pass; or the last of these alone."""
        rows = self._fresh(positions) + (self.first - self.position)
        return rows[-1:] if last else rows

    def kept(self) -> Rows:
        """The positions of which something is kept."""
        meant = {keeper.positions for keeper in self.request.program.form.keepers}
        found = [self._fresh(positions) for positions in meant]
        return found[0] if len(found) == 1 else np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def _fresh(self, positions: Positions) -> Rows:
        start = max(self.request.seen, self.position)
        return self.request.selected[positions].rows(start, self.position + self.count)


def none_of(rows: int) -> Slots:
    """Slots of rows that want nothing."""
    return np.full(rows, -1, np.int32)


def flat(x: Tensor, rows: int) -> Tensor:
    """[row, width]: models that come from transformers have a batch axis of 1 before it."""
    own = x[0] if x.ndim > 2 and x.shape[0] == 1 != rows else x
    return own.flatten(1)


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The columns of all sites beside each other, by dtype: how many, where a site's begin, and each kept thing's."""

    version: int
    widths: Mapping[torch.dtype, int]
    starts: Mapping[tuple[Site, torch.dtype], int]
    first: Mapping[Kept, int]

    @classmethod
    def of(cls, columns: Columns, dtype: torch.dtype) -> "Layout":
        """Of the columns that there are, in a model of this dtype."""
        starts: dict[tuple[Site, torch.dtype], int] = {}
        widths: dict[torch.dtype, int] = {dtype: 0, torch.float32: 0}
        for (site, kind), width in columns.widths.items():
            starts[site, kind] = widths[kind]
            widths[kind] += width
        return cls(columns.version, widths, starts, columns.firsts(starts))

    def at(self, site: Site, buffers: Mapping[torch.dtype, Tensor]) -> dict[torch.dtype, Tensor]:
        """The buffers from a site's first column on."""
        return {dtype: buffer[:, self.starts.get((site, dtype), 0) :] for dtype, buffer in buffers.items()}


class Buffers:
    """Those that stay, and the ways to make a pass's own."""

    def __init__(self, tables: "Tables", launch: Launch, known: Places) -> None:
        self._tables, self.launch, self._known = tables, launch, known
        self.width = max(known.widths.values())
        self._slots: Tensor | None = None
        self._said: bytes | None = None  # what the slots of the graphs hold
        self._stash = torch.empty(0)
        self._kept: dict[torch.dtype, Tensor] = {}
        self._kept_for: Layout | None = None
        self._layout: Layout | None = None

    def layout(self) -> Layout:
        """Where the columns of all sites stand beside each other."""
        if self._layout is None or self._layout.version != self._tables.columns.version:
            self._layout = Layout.of(self._tables.columns, self._known.dtype)
        return self._layout

    def whole(self, rows: int) -> dict[torch.dtype, Tensor]:
        """New buffers with the columns of all sites."""
        device = self._tables.device
        widths = self.layout().widths.items()
        return {dtype: torch.empty(rows, max(1, width), dtype=dtype, device=device) for dtype, width in widths}

    # -- of graphs

    def settle(self, rows: int) -> None:
        """Makes buffers for graphs of up to so many rows; those of an earlier `Columns.version` are let go."""
        device = self._tables.device
        if self._slots is None or len(self._slots) < rows:
            self._slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
            self._stash = torch.empty(rows, self.width, dtype=self._known.dtype, device=device)
            self._said, self._kept_for = None, None
        if self._kept_for is not self.layout():
            self._kept, self._kept_for = self.whole(rows), self.layout()

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
        own = self.layout().at(self._tables.sites[site], self._kept)
        self.launch(site, x, residual, self._slots, own, self._stash)

    def snapshot(self, rows: int) -> Chunk:
        """What a replay has left behind, on its way to the host as the newest step of a chunk."""
        layout = self.layout()
        own = {dtype: self._kept[dtype][:rows].clone() for dtype, width in layout.widths.items() if width}
        return self._tables.leaving.step(own, layout.first, alone=False)

    def there(self, tensor: Tensor) -> Tensor:
        """A small tensor, from which a copy to the device does not wait."""
        return tensor.pin_memory() if self._tables.device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one request keeps at a site: of these rows of the pass. `key` is the same where the rows are."""

    owner: int
    keeper: Keeper
    rows: Rows
    key: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Picked:
    """Rows that leave together, all where `index` is None, and where each request's stand among them."""

    index: Tensor | None
    spans: Sequence[tuple[int, int]]


class TablePass:
    """One pass over rows that are in the tables."""

    def __init__(self, tables: "Tables", owned: Sequence[Owned], total: int) -> None:
        self._tables, self._owned, self.total = tables, owned, total
        slots = [-1] * total
        for each in owned:
            each.request.say(each.position, each.count, slots, each.first)
        self.slots = np.array(slots, np.int32)
        numbers = set(slots) - {-1}
        tables.recipes.send()
        numbered = tables.recipes.numbered
        parts = {numbered[number].part for number in numbers}  # one for all requests that differ in numbers alone
        self.sites = frozenset(site for part in parts for site in part.by_site)
        self._numbers = frozenset(tables.numbers[site] for site in self.sites)
        self._device_slots: Tensor | None = None
        self._stash: Tensor | None = None
        self._whole: dict[torch.dtype, Tensor] | None = None
        self._gathered: dict[int, Gathered] = {}
        self._picks: dict[tuple[Any, ...], _Picked] = {}
        self.in_graphs = False  # whether other taps of the pass are in CUDA graphs
        self._keeps = any(each.request.program.form.keepers for each in owned)

    # -- taps that are alive

    def tap(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        """What passes at a tap: done to at once."""
        if site not in self._numbers:
            return
        if self.in_graphs:  # this tap is in none of them, and what they keep is kept beside it
            self._buffers.launch_static(site, x, residual)
            return
        x, residual = flat(x, self.total), None if residual is None else flat(residual, self.total)
        tables, buffers = self._tables, self._buffers
        if self._device_slots is None or self._stash is None:
            self._device_slots = buffers.there(torch.from_numpy(self.slots)).to(tables.device, non_blocking=True)
            self._stash = x.new_empty(self.total, buffers.width)
            self._whole = buffers.whole(self.total) if self._is_small() else None
        where = tables.sites[site]
        if self._whole is not None:
            kept = buffers.layout().at(where, self._whole)
            buffers.launch(site, x, residual, self._device_slots, kept, self._stash)
            return
        kept = {
            dtype: torch.empty(
                self.total, max(1, tables.columns.widths.get((where, dtype), 0)), dtype=dtype, device=x.device
            )
            for dtype in {x.dtype, torch.float32}
        }
        buffers.launch(site, x, residual, self._device_slots, kept, self._stash)
        if self._keeps:
            self._gather(where, kept)

    def _is_small(self) -> bool:
        """Whether the rows of all sites have room beside each other, and leave as they are."""
        widths = self._buffers.layout().widths
        size = self.total * sum(width * dtype.itemsize for dtype, width in widths.items())
        plain = all(keeper.reduce is None for each in self._owned for keeper in each.request.program.form.keepers)
        return plain and size <= SMALL_BYTES

    def _gather(self, site: Site, kept: dict[torch.dtype, Tensor]) -> None:
        """Sends what is kept at a site on its way: one transfer of rows, and one of sums."""
        for dtype, buffer in kept.items():
            wanted = self._wanted.get((site, dtype), ())
            if rows := [each for each in wanted if each.keeper.reduce != "mean"]:
                self._gather_rows(rows, buffer)
            if sums := [each for each in wanted if each.keeper.reduce == "mean"]:
                self._gather_sums(sums, buffer)

    def _gather_rows(self, wanted: "Sequence[_Wanted]", buffer: Tensor) -> None:
        picked = self._picked(tuple(each.key for each in wanted), wanted)
        there = self._tables.leaving.host(buffer if picked.index is None else buffer[picked.index])
        for each, (start, stop) in zip(wanted, picked.spans, strict=True):
            column = self._tables.columns.first(each.keeper.kept)
            self._part(each.owner).rows[each.keeper.kept] = Cut(there, start, stop, column)

    def _gather_sums(self, wanted: "Sequence[_Wanted]", buffer: Tensor) -> None:
        """Of each request's rows; all requests in one product with the rows that each of them has."""
        picked = self._picked(tuple(each.key for each in wanted), wanted)
        rows = (buffer if picked.index is None else buffer[picked.index]).float()
        owners = np.repeat(np.arange(len(wanted)), [stop - start for start, stop in picked.spans])
        index = self._buffers.there(torch.from_numpy(owners)).to(buffer.device, non_blocking=True)
        sums = rows.new_zeros(len(wanted), rows.shape[1]).index_add_(0, index, rows)
        there = self._tables.leaving.host(sums)
        for number, (each, (start, stop)) in enumerate(zip(wanted, picked.spans, strict=True)):
            column = self._tables.columns.first(each.keeper.kept)
            self._part(each.owner).sums[each.keeper.kept] = Cut(there, number, number + 1, column), stop - start

    def _picked(self, key: tuple[Any, ...], wanted: "Sequence[_Wanted]") -> "_Picked":
        """Which rows leave: found once for all sites that keep the same."""
        if key not in self._picks:
            rows = np.concatenate([each.rows for each in wanted])
            ends = np.cumsum([len(each.rows) for each in wanted]).tolist()
            spans = list(zip([0, *ends[:-1]], ends, strict=True))
            is_whole = len(rows) == self.total and bool((rows == np.arange(self.total)).all())
            there = None if is_whole else self._buffers.there(torch.from_numpy(rows))
            index = None if there is None else there.to(self._tables.device, non_blocking=True)
            self._picks[key] = _Picked(index, spans)
        return self._picks[key]

    @cached_property
    def _wanted(self) -> "Mapping[tuple[Site, torch.dtype], Sequence[_Wanted]]":
        """What is kept of the pass's rows, by the site at which it is."""
        found: dict[tuple[Site, torch.dtype], list[_Wanted]] = {}
        for owner, each in enumerate(self._owned):
            rows: dict[tuple[Positions, bool], Rows] = {}
            for keeper in each.request.program.form.keepers:
                which = keeper.positions, keeper.reduce == "last"
                if which not in rows:
                    rows[which] = each.rows(which[0], last=which[1])
                if len(rows[which]):
                    own = _Wanted(owner, keeper, rows[which], (owner, id(rows[which])))
                    found.setdefault((keeper.kept.site, keeper.kept.dtype), []).append(own)
        return found

    def _part(self, number: int) -> Gathered:
        return self._gathered.setdefault(number, Gathered())

    # -- its end

    def end(self, *, replayed: bool) -> None:
        """The pass is over: what was kept belongs to the requests. `replayed`: a graph has done all of it."""
        if self._keeps and replayed:
            self._leave(self._buffers.snapshot(self.total), None)
        elif self._keeps and self._whole is not None:
            self._leave_whole(self._whole)
        elif self._gathered:
            event = self._tables.leaving.done()
            for number, part in self._gathered.items():
                part.event = event
                self._owned[number].request.trail.gathered(part)
        for each in self._owned:
            each.request.seen = max(each.request.seen, each.position + each.count)

    def _leave_whole(self, buffers: dict[torch.dtype, Tensor]) -> None:
        """Those rows leave of which something is kept."""
        wanted = [each.kept() for each in self._owned]
        rows = np.concatenate([each.first - each.position + own for each, own in zip(self._owned, wanted, strict=True)])
        layout = self._buffers.layout()
        used = {dtype: buffer for dtype, buffer in buffers.items() if layout.widths[dtype]}
        if len(rows) < self.total:
            index = self._buffers.there(torch.from_numpy(rows)).to(self._tables.device, non_blocking=True)
            used = {dtype: buffer[index] for dtype, buffer in used.items()}
        self._leave(self._tables.leaving.step(used, layout.first, alone=True), wanted)

    def _leave(self, chunk: Chunk, wanted: Sequence[Rows] | None) -> None:
        """Rows in a chunk belong to their requests: those `wanted`, one after another, or all, where they were."""
        start = 0
        for number, each in enumerate(self._owned):
            if wanted is not None:
                stop = start + len(wanted[number])
                if stop > start:
                    each.request.trail.rows(chunk, start, stop, wanted[number].tolist())
                start = stop
            elif each.request.program.form.keepers and each.position + each.count > each.request.seen:
                fresh = max(each.request.seen, each.position)
                first, last = each.first + fresh - each.position, each.first + each.count
                each.request.trail.rows(chunk, first, last, list(range(fresh, each.position + each.count)))

    @property
    def _buffers(self) -> Buffers:
        buffers: Any = self._tables.buffers
        assert buffers is not None
        return buffers
