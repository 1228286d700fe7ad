"""What passes at a tap, and the rows of the requests that wait there: copied together, and written back together.

A block's copy has memory of its own, so that one which is saved does not keep the batch, and a version counter of its
own, by which its edits are seen. What a block leaves changed goes back when all who wait at the tap have run on, or
before its own rows are looked at again.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from jackfield.interleave.channel import Channel

if TYPE_CHECKING:
    from jackfield.engines.vllm.companion import Companion

Views = tuple[Tensor, ...] | list[Tensor]

GATHERED_BYTES: Final = 1 << 25
"""Of what is copied together, before the blocks run that it is for: all of it is in memory at once."""


class Tapped:
    """The one tensor that passes, or the two whose sum is the stream: [row, width], of the whole batch.

    `delays`: whether edits wait for each other.
    """

    __slots__ = ("_cut", "delays", "residual", "x")

    def __init__(self, x: Tensor, residual: Tensor | None = None, *, delays: bool = False) -> None:
        self.x, self.residual, self.delays = x, residual, delays
        self._cut: tuple[list[slice], Cut] = [], Cut((), (), None)  # who reads mostly writes as well

    def cut(self, those: Sequence["Halves"]) -> "Cut":
        """The rows of these requests. `those` are in the order of their rows."""
        rows = [each.rows for each in those]
        if self._cut[0] != rows:
            sizes = [each.stop - each.start for each in rows]
            here = slice(rows[0].start, rows[-1].stop)
            x, residual = (None if half is None else half[None, here] for half in (self.x, self.residual))
            assert x is not None
            if sum(sizes) == here.stop - here.start:
                cut = Cut(sizes, split(x, sizes), None if residual is None else split(residual, sizes))
            else:
                cut = Cut(sizes, _picked(x, rows), None if residual is None else _picked(residual, rows))
            self._cut = rows, cut
        return self._cut[1]


@dataclass(frozen=True, slots=True)
class Cut:
    """Views of the rows of some requests, [1, token, width] each: of the one tensor, and of the other."""

    sizes: Sequence[int]
    x: Views
    residual: Views | None


class Halves:
    """One request's rows of what passes, and its edit [1, token, width] that waits to be put back."""

    __slots__ = ("companion", "edit", "rows", "tapped")

    def __init__(self, tapped: Tapped, rows: slice, companion: "Companion") -> None:
        self.tapped, self.rows, self.companion = tapped, rows, companion
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
            with torch.inference_mode(self.tapped.x.is_inference()):  # only there such tensors can be written to
                edit[0].write_alone(self, edit[1])


class RowsChannel(Channel):
    """A channel of whole rows, those of many requests at once where it can be had `together`."""

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
    wanted: dict[RowsChannel, list[Halves]] = {}
    for each in waiting:
        channel = each.companion.worker.awaited
        if channel is not None and channel.together:
            wanted.setdefault(cast("RowsChannel", channel), []).append(each)
    for channel, those in wanted.items():
        those.sort(key=_first)
        for each, copy in zip(those, channel.read_together(those), strict=True):
            each.companion.worker.gathered = channel, copy


def write_back(edited: Sequence[Halves], alone: Callable[[Halves], None]) -> None:
    """Puts the edits that wait back, together; where that fails each by `alone`, so that it fails by itself."""
    waiting: dict[RowsChannel, list[Halves]] = {}
    for each in edited:
        if each.edit is not None:
            waiting.setdefault(each.edit[0], []).append(each)
    for channel, those in waiting.items():
        those.sort(key=_first)
        try:
            channel.write_together(those)
        except Exception:
            for each in those:
                alone(each)
        for each in those:
            each.edit = None


def in_groups(waiting: Sequence[Halves]) -> Iterator[Sequence[Halves]]:
    """As many at a time as are copied together: rows of up to `GATHERED_BYTES`, and one at least."""
    x, first, rows = waiting[0].tapped.x, 0, 0
    if x.nbytes > GATHERED_BYTES:
        most = GATHERED_BYTES * x.shape[0] // x.nbytes
        for place, each in enumerate(waiting):
            count = each.rows.stop - each.rows.start
            if rows + count > most and place > first:
                yield waiting[first:place]
                first, rows = place, 0
            rows += count
    yield waiting[first:]


def split(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of [1, row, width], of so many rows each."""
    return tensor.split_with_sizes(sizes, 1)


def _picked(tensor: Tensor, rows: Sequence[slice]) -> list[Tensor]:
    """Views of these rows of [1, row, width], which begins with the first of them."""
    sizes, places, end = list[int](), list[int](), rows[0].start
    for each in rows:
        if each.start > end:
            sizes.append(each.start - end)
        places.append(len(sizes))
        sizes.append(each.stop - each.start)
        end = each.stop
    views = split(tensor, sizes)
    return [views[place] for place in places]


_first = attrgetter("rows.start")
