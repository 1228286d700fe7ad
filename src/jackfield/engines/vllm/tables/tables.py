"""Requests whose interventions are tables: which rows of a pass they own, and what each site does to them.

Nothing here waits, and nothing is called per request at a site: a pass has one slot per row, which says what the row
wants, and each site that somebody wants launches once. Where a CUDA graph is replayed, the launches are in it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from jackfield.engines.vllm.companion import Fate
from jackfield.engines.vllm.shipping import Interventions, unpacked
from jackfield.engines.vllm.tables.bank import Bank
from jackfield.engines.vllm.tables.buffers import Buffers
from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.launching import launch_for
from jackfield.engines.vllm.tables.ops import Part
from jackfield.engines.vllm.tables.program import Places, Program, program
from jackfield.engines.vllm.tables.recipes import Recipes, Segment
from jackfield.engines.vllm.tables.trail import Leaving, Trail
from jackfield.interleave.site import Site
from jackfield.interventions.positions import Positions, Selected, select

NUMBERS: Final = 2**24
"""Room for vectors on a GPU: 4,096 of width 4,096, which are 64 MiB."""
OPS: Final = 2**16
RECIPES: Final = 2048
MOST_PROGRAMS: Final = 1024
"""How many are remembered of what was sent."""
MOST_COLUMNS: Final = 2**18
"""Kept of a row of a graph, over all sites: at 512 rows in bfloat16 256 MiB."""


class Tabled:
    """One request beside the passes. `seen` positions have passed."""

    def __init__(
        self,
        name: str,
        program: Program,
        selected: Mapping[Positions, Selected],
        segments: Sequence[Segment],
        *,
        most: int,
        turn: int,
    ) -> None:
        self.name, self.program, self.selected, self.segments = name, program, selected, segments
        self.seen = 0
        self.trail = Trail(program.form.keepers, program.form.strips, selected, most, turn)
        self._here = 0  # the segment of the newest position

    def parts(self, start: int, stop: int) -> list[Part]:
        """What is done to rows of these positions."""
        own = (each.recipe for each in self._from(start) if each.start < stop)
        return [recipe.part for recipe in own if recipe is not None]

    def say(self, start: int, count: int, slots: list[int], first: int) -> None:
        """Puts the numbers of the recipes of so many rows, from position `start` on, into `slots` from `first` on."""
        stop, behind = start + count, first - start
        for each in self._from(start):
            if each.start >= stop:
                break
            if each.recipe is not None:
                own = range(max(each.start, start) + behind, min(each.stop, stop) + behind)
                slots[own.start : own.stop] = [each.recipe.number] * len(own)

    def _from(self, start: int) -> Sequence[Segment]:
        """The segments that end after a position."""
        if self._here and self.segments[self._here].start > start:  # computed again after a preemption
            self._here = 0
        while self._here + 1 < len(self.segments) and self.segments[self._here].stop <= start:
            self._here += 1
        return self.segments[self._here :]


class Tables:
    """All of them. `sites` are the taps, by number."""

    def __init__(self, sites: Sequence[Site], device: torch.device) -> None:
        self.sites = sites
        self.numbers: Mapping[Site, int] = {site: number for number, site in enumerate(sites)}
        self.device, self.columns, self.leaving = device, Columns(), Leaving(device)
        self.requests: dict[str, Tabled] = {}
        self.known: Places | None = None  # when the probe has run
        self._uses: dict[Program, int] = {}
        self._programs: OrderedDict[bytes, _Known] = OrderedDict()
        self._recipes: Recipes | None = None
        self.buffers: Buffers | None = None

    @property
    def recipes(self) -> Recipes:
        """What rows want. The tables are made when the first request needs them."""
        if self._recipes is None:
            on_gpu = self.device.type == "cuda"
            bank = Bank(self.numbers, self.device, numbers=NUMBERS, ops=OPS, recipes=RECIPES) if on_gpu else None
            self._recipes = Recipes(bank, self.columns)
            assert self.known is not None
            self.buffers = Buffers(self, launch_for(self, bank), self.known)
        return self._recipes

    def take(self, request_id: str, name: str, sent: Interventions) -> bool:
        """Whether a request's interventions run here from now on. Where not, they run as the block that they are."""
        if self.known is None:
            return False
        known = self._program(sent.payload, self.known)
        if known.program is None or not self._hold(known.program):
            return False
        length, end = sent.prompt_length, sent.prompt_length + sent.max_tokens - 1
        selected = {positions: select(positions, length, end) for positions in known.program.form.positions}
        segments = self.recipes.segments(known.program, selected, end)
        if segments is None:
            self._let_go(known.program)
            return False
        turn = len(self.requests)
        self.requests[request_id] = Tabled(name, known.program, selected, segments, most=end, turn=turn)
        return True

    def _program(self, payload: bytes, known: Places) -> "_Known":
        """What a payload comes down to: found once for all requests that have the same."""
        found = self._programs.get(payload)
        if found is None:
            found = self._programs[payload] = _Known(program(*unpacked(payload), known))
            while len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(payload)
        return found

    def end(self, request_id: str) -> Fate:
        """What a request has left behind. It is forgotten here."""
        request = self.requests[request_id]
        self.drop(request_id)
        try:
            with torch.inference_mode(False):
                return Fate(request.trail.saved(), is_data=True)
        except Exception as error:  # of a reduction over nothing
            return Fate.failed(error)

    def drop(self, request_id: str) -> None:
        """The request is not served any more."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.recipes.give(request.segments)
            self._let_go(request.program)

    def wanted(self, scheduled: Mapping[str, int]) -> frozenset[Site]:
        """Where a pass over so many rows of each request has something to do."""
        found = set[Part]()  # one for all requests that differ in numbers alone
        for request_id, request in self._among(scheduled):
            found.update(request.parts(request.seen, request.seen + scheduled[request_id]))
        return frozenset(site for part in found for site in part.by_site)

    def has(self, request_ids: Iterable[str]) -> bool:
        """Whether one of these requests is here."""
        return any(True for _ in self._among(request_ids))

    def _among(self, request_ids: Iterable[str]) -> list[tuple[str, Tabled]]:
        if not self.requests:
            return []
        return [(each, self.requests[each]) for each in request_ids if each in self.requests]

    def _hold(self, made: Program) -> bool:
        """Takes the columns that a program leaves rows in; False, and nothing taken, where there would be too many."""
        self._uses[made] = self._uses.get(made, 0) + 1
        if self._uses[made] > 1:
            return True
        if self.columns.total > MOST_COLUMNS // 2:
            self.columns.clear()  # those that nobody has any more, if nobody has any
        for keeper in made.form.keepers:
            self.columns.take(keeper.kept)
        if self.columns.total <= MOST_COLUMNS:
            return True
        self._let_go(made)
        return False

    def _let_go(self, made: Program) -> None:
        self._uses[made] -= 1
        if not self._uses[made]:
            del self._uses[made]
            for keeper in made.form.keepers:
                self.columns.give(keeper.kept)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a payload comes down to: None, where it has to be a block."""

    program: Program | None
