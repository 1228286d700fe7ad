"""Where the next block of a code will wait, as the newest ones of it tell.

A prompt's graphs have to be cut before its block has waited for anything. What is foreseen wrongly costs a second pass,
and is forgotten.
"""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from types import CodeType
from typing import Final

from jackfield.interleave.site import Site

MOST_CODES: Final = 256
"""How many are remembered; the one unused for longest goes first."""


@dataclass(frozen=True, slots=True)
class _Last:
    sites: frozenset[Site]
    twice: bool  # whether the one before waited at the same


class Foresight:
    """By the code of blocks; the same code may do another thing with other values."""

    def __init__(self) -> None:
        self._last: OrderedDict[CodeType, _Last] = OrderedDict()

    def of(self, code: CodeType | None) -> frozenset[Site] | None:
        """Where a block of this code will wait, if the newest two have waited at the same sites; else None."""
        last = None if code is None else self._last.get(code)
        return last.sites if last is not None and last.twice else None

    def learn(self, code: CodeType | None, sites: Set[Site]) -> None:
        """A block of this code has ended, and has waited at these sites."""
        if code is None:
            return
        last, own = self._last.pop(code, None), frozenset(sites)
        self._last[code] = _Last(own, last is not None and last.sites == own)
        while len(self._last) > MOST_CODES:
            self._last.popitem(last=False)
