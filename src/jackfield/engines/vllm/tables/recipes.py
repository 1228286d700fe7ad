"""Recipes: what is done to a row at each site. Requests whose rows want the same share one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jackfield.engines.vllm.tables.bank import Bank, Entry
from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.ops import Act, Part
from jackfield.engines.vllm.tables.program import Program
from jackfield.interventions.positions import Positions, Selected


@dataclass(eq=False, slots=True)
class Recipe:
    """Operations by site, and the number by which rows say that they want them."""

    number: int
    key: "Key"
    part: Part
    acts: Sequence[Act]
    entry: Entry | None
    uses: int = 0


Key = tuple[Program, frozenset[Positions]]
"""A program, and which of its positions a row is at."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions from `start` to before `stop`, of which each wants the same."""

    start: int
    stop: int
    recipe: Recipe | None


class Recipes:
    """Those that requests use now. Without a bank they are known to the host alone."""

    def __init__(self, bank: Bank | None, columns: Columns) -> None:
        self._bank, self._columns = bank, columns
        self._known: dict[Key, Recipe] = {}
        self.numbered: dict[int, Recipe] = {}

    def segments(self, program: Program, selected: Mapping[Positions, Selected], end: int) -> list[Segment] | None:
        """What each position before `end` wants. None where the tables have no room; nothing is taken then."""
        found: list[Segment] = []
        for start, stop in pairwise(_edges(selected.values(), end)):
            meant = frozenset(positions for positions, those in selected.items() if start in those)
            recipe = self._take((program, meant)) if meant else None
            if meant and recipe is None:
                self.give(found)
                return None
            found.append(Segment(start, stop, recipe))
        return found

    def send(self) -> None:
        """Before a pass: what is new goes to the device."""
        if self._bank is not None:
            self._bank.send()

    def give(self, segments: Sequence[Segment]) -> None:
        """A request less wants these."""
        for recipe in (segment.recipe for segment in segments):
            if recipe is None:
                continue
            recipe.uses -= 1
            if not recipe.uses:
                del self._known[recipe.key], self.numbered[recipe.number]
                if self._bank is not None and recipe.entry is not None:
                    self._bank.remove(recipe.entry)

    def _take(self, key: Key) -> Recipe | None:
        recipe = self._known.get(key)
        if recipe is None:
            recipe = self._made(key)
            if recipe is None:
                return None
            self._known[key] = self.numbered[recipe.number] = recipe
        recipe.uses += 1
        return recipe

    def _made(self, key: Key) -> Recipe | None:
        program, meant = key
        part = program.form.part(meant)
        if self._bank is None:
            free = next(number for number in range(len(self.numbered) + 1) if number not in self.numbered)
            return Recipe(free, key, part, program.acts, None)
        entry = self._bank.add(part, program.acts, self._columns)
        return None if entry is None else Recipe(entry.number, key, part, program.acts, entry)


def _edges(several: Iterable[Selected], end: int) -> list[int]:
    """Where what is wanted may change, from 0 to `end`."""
    edges = {0, end}
    for selected in several:
        edges |= _changes(selected, end)
    return sorted(edge for edge in edges if 0 <= edge <= end)


def _changes(selected: Selected, end: int) -> set[int]:
    found = {edge for point in selected.points for edge in (point, point + 1)}
    for span in selected.spans:
        reached = range(span.start, min(span.stop, end), span.step)  # a range may go on for ever
        ends = (span.start, span.stop)
        found |= set(ends) if span.step == 1 else {edge for each in reached for edge in (each, each + 1)}
    return found
