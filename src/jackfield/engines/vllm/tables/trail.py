"""What a request's rows have left behind, from pass to pass, on its way to `Result.saved`.

Rows leave the device at the end of their pass, on a stream of their own, into pinned memory, all requests' together.
Nobody waits for them before the request has ended. While passes run, and the host has time, requests take out what has
come, each at steps of its own: little is left to be done when they end, many at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from jackfield.engines.vllm.tables.ops import Keeper, Kept
from jackfield.engines.vllm.tables.strips import Strip, Strips
from jackfield.interventions.kept import AllRows, LastRow, MeanRow
from jackfield.interventions.kept import Kept as Keeping
from jackfield.interventions.positions import Selected

LONG: Final = 8
"""Of how many passes a request takes out its own rows at once. Those of the newest two times so many stay: the device
may still be at the newest of all.
"""
STEPS: Final = 64
CHUNK_BYTES: Final = 2**25
"""Of pinned memory, for so many steps at most."""


@dataclass(slots=True)
class Chunk:
    """Buffers of passes alike, in pinned memory: {dtype: [step, row, column]}, and where each kept thing stands."""

    tensors: Mapping[torch.dtype, Tensor]
    first: Mapping[Kept, int]
    events: list[Any] = field(default_factory=list[Any])  # of each step: its rows are there
    _there: int = 0  # of so many steps it is known that they are

    def takes(self, buffers: Mapping[torch.dtype, Tensor], first: Mapping[Kept, int]) -> bool:
        """Whether another step like this has room."""
        shapes = {dtype: buffer.shape for dtype, buffer in buffers.items()}
        alike = self.first is first and {dtype: each.shape[1:] for dtype, each in self.tensors.items()} == shapes
        return alike and all(len(self.events) < len(each) for each in self.tensors.values())

    def wait(self, step: int) -> None:
        """Until the rows of a step are there; those of earlier ones are then, too."""
        if step >= self._there:
            _wait(self.events[step])
            self._there = step + 1


class Leaving:
    """Tensors on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._chunk: Chunk | None = None

    def host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, whole once a later `done()` has been waited for. Nobody writes `tensor` any more."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)
        self._copy(there, tensor)
        return there

    def step(self, buffers: Mapping[torch.dtype, Tensor], first: Mapping[Kept, int], *, alone: bool) -> Chunk:
        """The buffers of one pass as the newest step of a chunk; `alone`: no pass like it will follow."""
        chunk = self._chunk
        if alone or chunk is None or not chunk.takes(buffers, first):
            chunk = self._made(buffers, first, 1 if alone else STEPS)
        if not alone:
            self._chunk = chunk
        for dtype, buffer in buffers.items():
            self._copy(chunk.tensors[dtype][len(chunk.events)], buffer)
        chunk.events.append(self.done())
        return chunk

    def done(self) -> Any:
        """An event: what has been asked for so far is there."""
        return None if self._stream is None else self._stream.record_event()

    def _made(self, buffers: Mapping[torch.dtype, Tensor], first: Mapping[Kept, int], steps: int) -> Chunk:
        size = sum(buffer.numel() * buffer.element_size() for buffer in buffers.values())
        steps = max(1, min(steps, CHUNK_BYTES // max(1, size)))
        pinned = self._stream is not None
        made = {
            dtype: torch.empty(steps, *buffer.shape, dtype=dtype, pin_memory=pinned)
            for dtype, buffer in buffers.items()
        }
        return Chunk(made, first)

    def _copy(self, there: Tensor, tensor: Tensor) -> None:
        if self._stream is None:
            there.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            there.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of a tensor that many share, from `column` on."""

    whole: Tensor
    start: int
    stop: int
    column: int

    def of(self, keeper: Keeper) -> Tensor:
        """The rows of what is kept, [row, ...]: a view where it can be one."""
        own = self.whole[self.start : self.stop, self.column : self.column + keeper.kept.width]
        return own.reshape(-1, *keeper.shape)


@dataclass(slots=True)
class Gathered:
    """What the sites of one pass gave for one request: rows, or for a mean the sum of so many."""

    rows: dict[Kept, Cut] = field(default_factory=dict[Kept, Cut])
    sums: dict[Kept, tuple[Cut, int]] = field(default_factory=dict[Kept, tuple[Cut, int]])
    event: Any = None


@dataclass(slots=True)
class _Own:
    """Rows of chunks that were alike, taken out: {dtype: [row, column]}, with room for more, at these positions."""

    tensors: Mapping[torch.dtype, Tensor]
    first: Mapping[Kept, int]
    positions: list[int] = field(default_factory=list[int])
    _meant: dict[Selected, Tensor | None] = field(default_factory=dict[Selected, Tensor | None])

    @classmethod
    def like(cls, chunk: Chunk, most: int) -> "_Own":
        """With room for so many rows like a chunk's; what is never written takes no memory."""
        with torch.inference_mode(False):  # they may be the user's
            made = {dtype: torch.empty(most, each.shape[-1], dtype=dtype) for dtype, each in chunk.tensors.items()}
        return cls(made, chunk.first)

    def take(self, run: "_Run") -> None:
        """The next rows."""
        start = len(self.positions)
        for dtype, tensor in self.tensors.items():
            rows = run.rows(dtype)
            tensor[start : start + len(rows)] = rows
        self.positions += run.positions

    def end(self) -> None:
        """No more rows will come: room that is left over is given back."""
        if any(len(each) > len(self.positions) for each in self.tensors.values()):
            self.tensors = {dtype: each[: len(self.positions)].clone() for dtype, each in self.tensors.items()}

    def meant(self, selected: Selected) -> Tensor | None:
        """Which of the rows are meant; None where all are."""
        if selected not in self._meant:
            held = np.array(self.positions)
            low, high = int(held.min()), int(held.max())
            wanted = selected.rows(low, high + 1)
            is_every = len(wanted) == high + 1 - low
            self._meant[selected] = None if is_every else torch.from_numpy(np.flatnonzero(np.isin(held, wanted)))
        return self._meant[selected]

    def results(self, strip: Strip, selected: Selected) -> Iterator[tuple[str, Tensor]]:
        """What is kept of these rows, [row, ...] each, in memory of its own."""
        rows = self.meant(selected)
        count = len(strip.names)
        whole = self.tensors[strip.dtype][: len(self.positions), strip.column : strip.column + count * strip.width]
        own = whole if rows is None else whole[rows]
        by_name = own.view(len(own), count, strip.width).transpose(0, 1).reshape(count, len(own), *strip.shape)
        for name, found in zip(strip.names, by_name, strict=True):
            yield name, found if found.nbytes == found.untyped_storage().nbytes() else found.clone()


@dataclass(slots=True)
class _Run:
    """Rows of one chunk: `start` to before `stop` of one step, or the row `start` of several steps in a row."""

    chunk: Chunk
    step: int
    start: int
    stop: int
    positions: list[int]
    steps: int = 1

    def joins(self, chunk: Chunk, step: int, start: int, stop: int) -> bool:
        """Whether one row of a later step is the next of this run."""
        is_next = self.chunk is chunk and self.step + self.steps == step
        return is_next and self.start == start and self.stop == stop == start + 1

    def rows(self, dtype: torch.dtype) -> Tensor:
        """[row, column]: a view."""
        if self.stop == self.start + 1:
            return self.chunk.tensors[dtype][self.step : self.step + self.steps, self.start]
        return self.chunk.tensors[dtype][self.step, self.start : self.stop]


class Trail:
    """The rows of one request, in the order of its positions."""

    def __init__(
        self, keepers: Sequence[Keeper], strips: Strips, selected: Mapping[Any, Selected], most: int, turn: int = 0
    ) -> None:
        """Of `most` positions at most; `turn`: any number, by which requests do not all take their rows out at once."""
        self._keepers, self._strips, self._selected, self._most = keepers, strips, selected, most
        self._parts: list[Gathered | _Own] = []
        self._runs: list[_Run] = []  # the newest
        self._longest = 1 + turn % LONG  # of the first run

    def gathered(self, part: Gathered) -> None:
        """What an eager pass has given, site by site."""
        self._take_out()
        self._parts.append(part)

    def rows(self, chunk: Chunk, start: int, stop: int, positions: list[int]) -> None:
        """Rows `start` to before `stop` of the newest step of a chunk."""
        step = len(chunk.events) - 1
        last = self._runs[-1] if self._runs else None
        if last is not None and last.steps < self._longest and last.joins(chunk, step, start, stop):
            last.steps += 1
            last.positions += positions
            return
        if last is not None and last.steps == self._longest and last.stop == last.start + 1:
            self._longest = LONG
        self._runs.append(_Run(chunk, step, start, stop, positions))
        self._take_out(newest=2)

    def saved(self) -> dict[str, Tensor]:
        """What `Result.saved` has of it. NotReached where nothing came that could be reduced."""
        self._take_out()
        first, *others = self._parts or (None,)
        if self._strips.are_all and isinstance(first, _Own) and not others:
            strips = self._strips.of(first.first)
            return dict(pair for strip in strips for pair in first.results(strip, self._selected[strip.positions]))
        for part in self._parts:
            if isinstance(part, _Own):
                part.end()
        return {str(keeper.place): self._result(keeper) for keeper in self._keepers}

    def _result(self, keeper: Keeper) -> Tensor:
        made = _keeping(keeper)
        for part in self._parts:
            if isinstance(part, Gathered):
                _wait(part.event)
                if keeper.kept in part.sums and isinstance(made, MeanRow):
                    total, count = part.sums[keeper.kept]
                    made.add_sum(total.of(keeper)[0], count)
                elif keeper.kept in part.rows:
                    made.add(part.rows[keeper.kept].of(keeper))
                continue
            own = part.meant(self._selected[keeper.positions])
            if own is None or own.numel():
                whole = part.tensors[keeper.kept.dtype]
                rows = Cut(whole, 0, len(whole), part.first[keeper.kept]).of(keeper)
                made.add(rows if own is None else rows[own])
        found = made.result()
        return found.clone() if found.is_inference() else found

    def _take_out(self, newest: int = 0) -> None:
        """Takes rows out of the chunks that they share with other requests; those of the `newest` runs stay."""
        split = len(self._runs) - newest
        taken, self._runs = self._runs[:split], self._runs[split:]
        for run in taken:
            run.chunk.wait(run.step + run.steps - 1)
            self._own_like(run.chunk).take(run)

    def _own_like(self, chunk: Chunk) -> _Own:
        """Where rows of such a chunk go: behind those of the newest part, if they are alike."""
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, _Own) or last.first is not chunk.first:
            last = _Own.like(chunk, self._most)
            self._parts.append(last)
        return last


def _keeping(keeper: Keeper) -> Keeping:
    if keeper.reduce == "last":
        return LastRow(keeper.place)
    if keeper.reduce == "mean":
        return MeanRow(keeper.place)
    return AllRows(keeper.place, torch.empty(0, *keeper.shape, dtype=keeper.kept.dtype))


def _wait(event: Any) -> None:
    if event is not None and not event.query():  # which, unlike to wait, lets no other thread in between
        event.synchronize()
