"""What a request's rows have left behind, from pass to pass, on its way to `Result.saved`.

Rows leave the device at the end of their pass, on a stream of their own, into pinned memory, all requests' together.
Nobody waits for them before the request has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from jackfield.engines.vllm.tables.ops import Keeper, Kept
from jackfield.interventions.kept import AllRows, LastRow, MeanRow
from jackfield.interventions.kept import Kept as Keeping
from jackfield.interventions.positions import Selected

LONG: Final = 128
"""How many passes' rows a request leaves with all others' before it takes its own out."""
STEPS: Final = 64
CHUNK_BYTES: Final = 2**25
"""Of pinned memory, for so many steps at most."""


@dataclass(slots=True)
class Chunk:
    """Buffers of passes alike, in pinned memory: {dtype: [step, row, column]}, and where each kept thing stands."""

    tensors: Mapping[torch.dtype, Tensor]
    first: Mapping[Kept, int]
    events: list[Any] = field(default_factory=list[Any])  # of each step: its rows are there

    def takes(self, buffers: Mapping[torch.dtype, Tensor], first: Mapping[Kept, int]) -> bool:
        """Whether another step like this has room."""
        shapes = {dtype: buffer.shape for dtype, buffer in buffers.items()}
        alike = self.first is first and {dtype: each.shape[1:] for dtype, each in self.tensors.items()} == shapes
        return alike and all(len(self.events) < len(each) for each in self.tensors.values())


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
    """Rows of chunks that were alike, taken out: {dtype: [row, column]} at these positions."""

    tensors: Mapping[torch.dtype, Tensor]
    first: Mapping[Kept, int]
    positions: Sequence[int]
    _meant: dict[Selected, list[int] | None] = field(default_factory=dict[Selected, list[int] | None])

    def meant(self, selected: Selected) -> list[int] | None:
        """Which of the rows are meant; None where all are."""
        if selected not in self._meant:
            rows = [row for row, position in enumerate(self.positions) if position in selected]
            self._meant[selected] = None if len(rows) == len(self.positions) else rows
        return self._meant[selected]


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

    def __init__(self, keepers: Sequence[Keeper], selected: Mapping[Any, Selected]) -> None:
        self._keepers, self._selected = keepers, selected
        self._parts: list[Gathered | _Own] = []
        self._runs: list[_Run] = []  # the newest
        self._count = 0

    def gathered(self, part: Gathered) -> None:
        """What an eager pass has given, site by site."""
        self._take_out()
        self._parts.append(part)

    def rows(self, chunk: Chunk, start: int, stop: int, positions: list[int]) -> None:
        """Rows `start` to before `stop` of the newest step of a chunk."""
        step = len(chunk.events) - 1
        last = self._runs[-1] if self._runs else None
        if last is not None and last.joins(chunk, step, start, stop):
            last.steps += 1
            last.positions += positions
        else:
            if self._count >= LONG:
                self._take_out()
            self._runs.append(_Run(chunk, step, start, stop, positions))
        self._count += 1

    def saved(self) -> dict[str, Tensor]:
        """What `Result.saved` has of it. NotReached where nothing came that could be reduced."""
        self._take_out()
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
            if own is None or len(own):
                whole = part.tensors[keeper.kept.dtype]
                rows = Cut(whole, 0, len(whole), part.first[keeper.kept]).of(keeper)
                made.add(rows if own is None else rows[own])
        return made.result()

    def _take_out(self) -> None:
        """Takes the rows out of the chunks that they share with other requests."""
        taken, self._runs, self._count = self._runs, [], 0
        while taken:
            first = taken[0].chunk.first
            alike = next((index for index, each in enumerate(taken) if each.chunk.first is not first), len(taken))
            runs, taken = taken[:alike], taken[alike:]
            for run in runs:
                _wait(run.chunk.events[run.step + run.steps - 1])
            tensors = {dtype: torch.cat([run.rows(dtype) for run in runs]) for dtype in runs[0].chunk.tensors}
            self._parts.append(_Own(tensors, first, [position for run in runs for position in run.positions]))


def _keeping(keeper: Keeper) -> Keeping:
    if keeper.reduce == "last":
        return LastRow(keeper.place)
    if keeper.reduce == "mean":
        return MeanRow(keeper.place)
    return AllRows(keeper.place, torch.empty(0, *keeper.shape, dtype=keeper.kept.dtype))


def _wait(event: Any) -> None:
    if event is not None:
        event.synchronize()
