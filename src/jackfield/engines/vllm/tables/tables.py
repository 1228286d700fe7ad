"""Requests whose interventions are tables: which rows of a pass they own, and what each site does to them.

Nothing here waits, and nothing is called per request at a site: a pass has one slot per row, which says what the row
wants, and each site that somebody wants launches once. Where a CUDA graph is replayed, the launches are in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from jackfield.engines.vllm.companion import Fate
from jackfield.engines.vllm.shipping import Shipment
from jackfield.engines.vllm.tables.bank import Bank
from jackfield.engines.vllm.tables.buffers import Buffers
from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.launching import launch_for
from jackfield.engines.vllm.tables.program import Places, Program, program
from jackfield.engines.vllm.tables.recipes import Recipes, Segment
from jackfield.engines.vllm.tables.trail import Leaving, Trail
from jackfield.interleave.site import Site
from jackfield.interventions.block import InterventionBlock

NUMBERS: Final = 2**24
"""Room for vectors on a GPU: 4,096 of width 4,096, which are 64 MiB."""
OPS: Final = 2**16
RECIPES: Final = 2048
MOST_COLUMNS: Final = 2**18
"""Kept of a row of a graph, over all sites: at 512 rows in bfloat16 256 MiB."""


class Tabled:
    """One request beside the passes. `seen` positions have passed."""

    def __init__(self, name: str, made: Program, segments: Sequence[Segment]) -> None:
        self.name, self.program, self.segments = name, made, segments
        self.seen = 0
        self.trail = Trail(made.keepers)
        self._here = 0  # the segment of the newest position

    def sites(self, start: int, stop: int) -> set[Site]:
        """Where something is done to rows of these positions."""
        own = (each.recipe for each in self._from(start) if each.start < stop)
        return {site for recipe in own if recipe is not None for site in recipe.by_site}

    def runs(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """What so many rows from position `start` on want: (first row, after the last, number of the recipe)."""
        stop, found = start + count, list[tuple[int, int, int]]()
        for each in self._from(start):
            if each.start >= stop:
                break
            if each.recipe is not None and each.stop > start:
                found.append((max(each.start, start) - start, min(each.stop, stop) - start, each.recipe.number))
        return found

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

    def take(self, request_id: str, shipment: Shipment) -> bool:
        """Whether a request's interventions run here from now on. Where not, they run as the block that they are."""
        block: object = shipment.block
        if self.known is None or not isinstance(block, InterventionBlock):
            return False
        made = program(block, self.known)
        if made is None:
            return False
        for keeper in made.keepers:
            self.columns.take(keeper.kept)
        too_many = self.columns.total > MOST_COLUMNS
        segments = None if too_many else self.recipes.segments(made, block.prompt_length + block.max_tokens - 1)
        if segments is None:
            self._forget(made)
            return False
        self.requests[request_id] = Tabled(shipment.name, made, segments)
        return True

    def end(self, request_id: str) -> Fate:
        """What a request has left behind. It is forgotten here."""
        request = self.requests[request_id]
        self.drop(request_id)
        try:
            with torch.inference_mode(False):
                return Fate(request.trail.saved())
        except Exception as error:  # of a reduction over nothing
            return Fate.failed(error)

    def drop(self, request_id: str) -> None:
        """The request is not served any more."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.recipes.give(request.segments)
            self._forget(request.program)

    def wanted(self, scheduled: Mapping[str, int]) -> frozenset[Site]:
        """Where a pass over so many rows of each request has something to do."""
        found = set[Site]()
        for request_id, request in self._among(scheduled):
            found |= request.sites(request.seen, request.seen + scheduled[request_id])
        return frozenset(found)

    def has(self, request_ids: Iterable[str]) -> bool:
        """Whether one of these requests is here."""
        return any(True for _ in self._among(request_ids))

    def _among(self, request_ids: Iterable[str]) -> list[tuple[str, Tabled]]:
        if not self.requests:
            return []
        return [(each, self.requests[each]) for each in request_ids if each in self.requests]

    def _forget(self, made: Program) -> None:
        for keeper in made.keepers:
            self.columns.give(keeper.kept)
        if self.columns.total > MOST_COLUMNS:
            self.columns.clear()
