"""Which tokens of a request an intervention is about: absolute positions, ranges of them, or a word.

| word | positions |
|---|---|
| `"all"` | every one |
| `"prompt"` | those of the prompt |
| `"last"` | the prompt's last token |
| `"generated"` | from the prompt's last token on, which is the one that makes the first new token |
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, SupportsIndex, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from jackfield.errors import near

Positions: TypeAlias = str | tuple[int | range, ...]
"""As they are kept: a word, or absolute positions and ranges of them."""
Rows: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Positions, or rows, in ascending order."""
GivenPositions: TypeAlias = str | int | range | Iterable[int | range] | None
"""As they may be written."""
WORDS: Final = ("all", "prompt", "last", "generated")
FORMS: Final = 'absolute positions (3, [3, 5], range(3, 9)), or "all", "prompt", "last" or "generated"'


@dataclass(frozen=True, slots=True)
class Selected:
    """The positions of one request that are meant."""

    points: frozenset[int]
    spans: tuple[range, ...]

    def __contains__(self, position: int) -> bool:
        return position in self.points or any(position in span for span in self.spans)

    def within(self, positions: range) -> list[int]:
        """Those of `positions` that are meant, counted from the first of them: the rows of a step."""
        return [row for row, position in enumerate(positions) if position in self]

    def rows(self, start: int, stop: int) -> Rows:
        """The positions from `start` to before `stop` that are meant, ascending."""
        every = np.arange(start, max(start, stop))
        if any(span.start <= start and stop <= span.stop and span.step == 1 for span in self.spans):
            return every
        mask = np.zeros(len(every), bool)
        for point in self.points:
            if start <= point < stop:
                mask[point - start] = True
        for span in self.spans:
            mask |= (every >= span.start) & (every < span.stop) & ((every - span.start) % span.step == 0)
        return every[mask]

    @property
    def first(self) -> int:
        """The earliest of them."""
        return min((*self.points, *(span.start for span in self.spans)))

    def mask(self, length: int, device: torch.device) -> Bool[Tensor, " position"]:
        """True at those of the first `length` positions that are meant."""
        mask = torch.zeros(length, dtype=torch.bool, device=device)
        mask[[point for point in self.points if point < length]] = True
        for span in self.spans:
            mask[span.start : span.stop : span.step] = True
        return mask


def read_positions(given: object) -> Positions:
    """A word or a tuple of positions and ranges; None is "all". ValueError, with the reason, for what is neither."""
    if given is None:
        return "all"
    if isinstance(given, str):
        if given not in WORDS:
            raise ValueError(f"{given!r} is no word for positions; write {FORMS}.{near(given, WORDS)}")
        return given
    several = isinstance(given, Iterable) and not isinstance(given, range)
    read = tuple(map(_one, cast("Iterable[object]", given if several else [given])))
    if not read:
        raise ValueError(f"no position is given; write {FORMS}.")
    return read


def _one(given: object) -> int | range:
    if isinstance(given, range):
        if not given or given.step < 0 or given.start < 0:
            raise ValueError(f"{given!r} has no positions in ascending order from 0; write range(3, 9).")
        return given
    position = whole(given, f"{given!r} is no position; write {FORMS}.")
    if position < 0:
        raise ValueError(f"position {position} counts from an end that moves; write an absolute position, or 'last'.")
    return position


def whole(given: object, otherwise: str) -> int:
    """A whole number of any integer type; ValueError(`otherwise`) for anything else, a bool too."""
    try:
        number = operator.index(cast("SupportsIndex", given))
    except TypeError:
        raise ValueError(otherwise) from None
    if isinstance(given, bool):
        raise ValueError(otherwise)
    return number


def select(positions: Positions, prompt_length: int, end: int) -> Selected:
    """What is meant in a request of `prompt_length` tokens whose positions end before `end`."""
    if isinstance(positions, str):
        start = prompt_length - 1 if positions in ("last", "generated") else 0
        stop = prompt_length if positions in ("prompt", "last") else end
        return Selected(frozenset(), (range(start, stop),))
    points = frozenset(each for each in positions if isinstance(each, int))
    return Selected(points, tuple(each for each in positions if isinstance(each, range)))


def check_reached(positions: Positions, prompt_length: int, end: int) -> None:
    """ValueError for a position, or the first of a range, at `end` or past it: the request never comes there."""
    if isinstance(positions, str):
        return
    for each in positions:
        first = each.start if isinstance(each, range) else each
        if first >= end:
            raise ValueError(
                f"position {first} is never reached: the prompt has {prompt_length} tokens and max_tokens is "
                f"{end - prompt_length + 1}, so positions are 0 to {end - 1}."
            )
