"""What passes at a tap, and the rows of the requests that wait there: copied together, and written back together.

A block's copy has memory of its own, so that one which is saved does not keep the batch, and a version counter of its
own, by which its edits are seen. What a block leaves changed goes back when all who wait at the tap have run on, or
before its own rows are looked at again.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from jackfield.interleave.worker import Channel

if TYPE_CHECKING:
    from jackfield.engines.vllm.companion import TracedWorker

GATHERED_BYTES: Final = 1 << 25
"""Of what is copied together, before the blocks run that it is for: all of it is in memory at once."""


@dataclass(slots=True)
class Tapped:
    """The one tensor that passes, or the two whose sum is the stream: [row, width], of the whole batch.

    `delays`: whether edits wait for each other.
    """

    x: Tensor
    residual: Tensor | None = None
    delays: bool = False

    def cut(self, rows: Sequence[slice]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Views of these rows, [1, token, width] each, of the one tensor and of the other. `rows` are in order."""
        sizes, places, end = list[int](), list[int](), rows[0].start
        for each in rows:
            if each.start > end:
                sizes.append(each.start - end)
            places.append(len(sizes))
            sizes.append(each.stop - each.start)
            end = each.stop
        x = self.x[None, rows[0].start : end].split(sizes, 1)
        if self.residual is None:
            return [x[place] for place in places], None
        residual = self.residual[None, rows[0].start : end].split(sizes, 1)
        return [x[place] for place in places], [residual[place] for place in places]


class Halves:
    """One request's rows of what passes, and its edit [1, token, width] that waits to be put back."""

    __slots__ = ("edit", "rows", "tapped", "worker")

    def __init__(self, tapped: Tapped, rows: slice, worker: "TracedWorker") -> None:
        self.tapped, self.rows, self.worker = tapped, rows, worker
        self.edit: tuple[RowsChannel, Tensor] | None = None

    @property
    def x(self) -> Tensor:
        """[token, width], a view."""
        return self.tapped.x[self.rows]

    @property
    def residual(self) -> Tensor | None:
        """[token, width], a view; None where nothing is to be added."""
        return None if self.tapped.residual is None else self.tapped.residual[self.rows]

    def settle(self) -> None:
        """Puts the edit that waits back, before the rows are looked at."""
        edit, self.edit = self.edit, None
        if edit is not None:
            edit[0].write_alone(self, edit[1])


class RowsChannel(Channel):
    """A channel of whole rows, those of many requests at once where it `gathers`."""

    gathers: bool

    @abstractmethod
    def read_together(self, waiting: Sequence[Halves]) -> Sequence[Tensor]:
        """The whole of each one's value, a private copy. They are in the order of their rows."""

    @abstractmethod
    def write_together(self, edited: Sequence[Halves]) -> None:
        """Puts the edits that wait in the place of their rows. They are in the order of their rows."""

    @abstractmethod
    def write_alone(self, passing: Halves, value: Tensor) -> None:
        """Puts one edit in the place of its rows."""


def gather(waiting: Sequence[Halves]) -> None:
    """Copies what each of them waits for, where it is all of its rows: the worker finds it when it reads."""
    for channel, those in _by_channel(sorted(waiting, key=_first), lambda each: each.worker.awaited):
        for each, copy in zip(those, channel.read_together(those), strict=True):
            each.worker.gathered = channel, copy


def write_back(edited: Iterable[Halves], alone: Callable[[Halves], None]) -> None:
    """Puts the edits that wait back, together; where that fails each by `alone`, so that it fails by itself."""
    waiting = sorted((each for each in edited if each.edit is not None), key=_first)
    for channel, those in _by_channel(waiting, lambda each: each.edit and each.edit[0]):
        try:
            channel.write_together(those)
        except Exception:
            for each in those:
                alone(each)
        for each in those:
            each.edit = None


def in_groups(waiting: Sequence[Halves]) -> Iterator[Sequence[Halves]]:
    """As many at a time as are copied together: rows of up to `GATHERED_BYTES`, and one at least."""
    x = waiting[0].tapped.x
    most, first, rows = GATHERED_BYTES // (x.shape[-1] * x.element_size() or 1), 0, 0
    for place, each in enumerate(waiting):
        count = each.rows.stop - each.rows.start
        if rows + count > most and place > first:
            yield waiting[first:place]
            first, rows = place, 0
        rows += count
    yield waiting[first:]


def _first(halves: Halves) -> int:
    return halves.rows.start


def _by_channel(
    those: Iterable[Halves], channel: Callable[[Halves], Channel | None]
) -> Iterable[tuple[RowsChannel, list[Halves]]]:
    found: dict[RowsChannel, list[Halves]] = {}
    for each in those:
        wanted = channel(each)
        if isinstance(wanted, RowsChannel) and wanted.gathers:
            found.setdefault(wanted, []).append(each)
    return found.items()
