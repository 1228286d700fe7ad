"""What a request's rows have left behind, from pass to pass, on its way to `Result.saved`.

Rows leave the device at the end of their pass, on a stream of their own, into pinned memory, all requests' together.
Nobody waits for them before the request has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from jackfield.engines.vllm.tables.program import Keeper, Kept
from jackfield.interventions.kept import AllRows, LastRow, MeanRow
from jackfield.interventions.kept import Kept as Keeping

LONG: Final = 64
"""How many passes' rows a request leaves with all others' before it takes its own out."""


class Leaving:
    """Tensors on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, whole once `done()` of later has been waited for. Nobody writes `tensor` any more."""
        if self._stream is None:
            return tensor.clone()
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            there.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        return there

    def done(self) -> Any:
        """An event: what has been asked for so far is there."""
        return None if self._stream is None else self._stream.record_event()


@dataclass(slots=True)
class Snapshot:
    """The buffers of one pass as they were at its end: {dtype: [row, column]}, and where each kept thing stands."""

    tensors: Mapping[torch.dtype, Tensor]
    first: Mapping[Kept, int]
    event: Any


@dataclass(slots=True)
class Gathered:
    """What the sites of one pass gave for one request: rows, or for a mean the sum of so many."""

    rows: dict[Kept, Tensor] = field(default_factory=dict[Kept, Tensor])
    sums: dict[Kept, tuple[Tensor, int]] = field(default_factory=dict[Kept, tuple[Tensor, int]])
    event: Any = None


@dataclass(frozen=True, slots=True)
class _Own:
    """Rows of snapshots that were alike, taken out: {dtype: [row, column]} at these positions."""

    tensors: Mapping[torch.dtype, Tensor]
    first: Mapping[Kept, int]
    positions: Sequence[int]


class Trail:
    """The rows of one request, in the order of its positions."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        self._parts: list[Gathered | _Own] = []
        self._rows: list[tuple[Snapshot, int, int]] = []  # the newest: a snapshot, the row in it, its position

    def gathered(self, part: Gathered) -> None:
        """What an eager pass has given."""
        self._take_out()
        self._parts.append(part)

    def row(self, snapshot: Snapshot, row: int, position: int) -> None:
        """A row of a pass that was a graph's replay."""
        self._rows.append((snapshot, row, position))
        if len(self._rows) >= 2 * LONG:
            self._take_out(LONG)

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
                    made.add_sum(total.view(keeper.shape), count)
                elif keeper.kept in part.rows:
                    made.add(part.rows[keeper.kept].reshape(-1, *keeper.shape))
                continue
            first = part.first[keeper.kept]
            rows = part.tensors[keeper.kept.dtype][:, first : first + keeper.kept.width]
            own = [index for index, position in enumerate(part.positions) if position in keeper.selected]
            if len(own) < len(part.positions):
                rows = rows[own]
            if len(own):
                made.add(rows.reshape(-1, *keeper.shape))
        return made.result()

    def _take_out(self, count: int | None = None) -> None:
        """Takes the oldest rows out of the snapshots that they share with other requests."""
        taken, self._rows = (self._rows, []) if count is None else (self._rows[:count], self._rows[count:])
        while taken:
            first = taken[0][0].first
            alike = next((index for index, (each, _, _) in enumerate(taken) if each.first is not first), len(taken))
            rows, taken = taken[:alike], taken[alike:]
            _wait(rows[-1][0].event)  # of one stream: those before it have happened
            tensors = {
                dtype: torch.stack([snapshot.tensors[dtype][row] for snapshot, row, _ in rows])
                for dtype in rows[0][0].tensors
            }
            self._parts.append(_Own(tensors, first, [position for _, _, position in rows]))


def _keeping(keeper: Keeper) -> Keeping:
    if keeper.reduce == "last":
        return LastRow(keeper.place)
    if keeper.reduce == "mean":
        return MeanRow(keeper.place)
    return AllRows(keeper.place, torch.empty(0, *keeper.shape, dtype=keeper.kept.dtype))


def _wait(event: Any) -> None:
    if event is not None:
        event.synchronize()
