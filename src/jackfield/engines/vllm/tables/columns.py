"""Which columns of a row's buffer are whose: requests that keep the same at a site share them."""

from dataclasses import dataclass, field

import torch

from jackfield.engines.vllm.tables.ops import Kept, Op
from jackfield.interleave.site import Site

Place = tuple[Site, torch.dtype]


@dataclass(slots=True)
class _Shared:
    first: int
    uses: int = 0


@dataclass(slots=True)
class Columns:
    """The columns of each site, by dtype, counted from the site's first. `version` grows when a site gets wider."""

    version: int = 0
    widths: dict[Place, int] = field(default_factory=dict[Place, int])
    _kept: dict[Kept, _Shared] = field(default_factory=dict[Kept, _Shared])

    def take(self, kept: Kept) -> int:
        """The first column of what is kept."""
        if kept not in self._kept:
            place = kept.site, kept.dtype
            first = self.widths.get(place, 0)
            self._kept[kept] = _Shared(first)
            self.widths[place] = first + kept.width
            self.version += 1
        self._kept[kept].uses += 1
        return self._kept[kept].first

    def give(self, kept: Kept) -> None:
        """One request less keeps it. Its columns stay for the next that does."""
        self._kept[kept].uses -= 1

    def first(self, kept: Kept) -> int:
        """The first column of what is kept, of those of its site."""
        return self._kept[kept].first

    def of(self, op: Op) -> int:
        """The column at which an operation leaves what it finds."""
        return 0 if op.kept is None else self.first(op.kept) + op.column

    @property
    def total(self) -> int:
        """How many there are, of all sites."""
        return sum(self.widths.values())

    def clear(self) -> bool:
        """Forgets all columns, if nobody keeps anything."""
        if any(shared.uses for shared in self._kept.values()):
            return False
        self._kept.clear()
        self.widths.clear()
        self.version += 1
        return True

    def firsts(self, starts: dict[Place, int]) -> dict[Kept, int]:
        """The first column of each kept thing, where the sites' columns stand one after another."""
        return {kept: starts[kept.site, kept.dtype] + shared.first for kept, shared in self._kept.items()}
