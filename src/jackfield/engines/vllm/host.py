"""The part of the vLLM engine that lives in each of its worker processes: traced requests beside the runner's passes.

The runner tells of each pass whose rows are where (`rows.py`); taps tell of tensors (`taps.py`). A request's step and
rows follow from absolute positions alone, so that nothing here depends on how the scheduler cut a batch.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from jackfield.engines.vllm.alike import Alike, Randomness
from jackfield.engines.vllm.companion import Companion, Fate
from jackfield.engines.vllm.foresight import Foresight
from jackfield.engines.vllm.forward_pass import FINAL_NORM, LOGITS, ForwardPass, Placed
from jackfield.engines.vllm.graphs import armed_site
from jackfield.engines.vllm.parts import Ranks
from jackfield.engines.vllm.recorder import PLAIN, PROBE, Recorder, rows_of
from jackfield.engines.vllm.rows import Row
from jackfield.engines.vllm.shipping import Ends, Interventions, Shipment, loads
from jackfield.engines.vllm.tables.buffers import Owned, TablePass
from jackfield.engines.vllm.tables.ops import EDITS
from jackfield.engines.vllm.tables.tables import Tabled, Tables
from jackfield.engines.vllm.taps import NOW
from jackfield.errors import TracingError
from jackfield.interleave.channel import Slots
from jackfield.interleave.reference import Shared
from jackfield.interleave.site import Site

MOST_FATES: Final = 4096
"""How many are kept of requests whose client may have gone away."""

ELSEWHERE: Final = (
    "This block could not be made on another rank of its model, where what it is made of may not be installed."
)


class Host:
    """The traced requests of one worker process, by vLLM's request ids and by the client's names."""

    def __init__(self, sites: Sequence[Site], ranks: Ranks, seed: int) -> None:
        self._ranks, self._seed = ranks, seed
        self.is_alone = ranks.size == 1
        self.slots = Slots()
        self.numbered = [self.slots[site] for site in sites]
        self.companions: dict[str, Companion] = {}
        self.fates: dict[str, Fate] = {}  # by the client's names
        self.shared: dict[str, Shared] = {}
        self.clock = 0
        self.order: dict[Site, int] = {}  # of the sites in a forward pass, as the probe saw them pass
        self.now: ForwardPass | None = None
        self.server: Any = None  # the engine whose parts blocks read, and the model over it
        self.model: Any = None
        self.recorder: Recorder | None = None  # of the probe that runs, and of the one before it
        self.plain: Recorder | None = None
        self._foresight = Foresight()
        self._ids: dict[str, str] = {}  # the client's name to vLLM's id
        self._edited = set[str]()  # who ended after an edit, until the scheduler says so
        self._stillborn: list[str] = []  # whose blocks could not be begun in this step
        self.tables: Tables | None = None  # of requests whose interventions need no Python
        self.early: Set[Site] = frozenset()  # what is kept until the attention op is there, for blocks that name it

    # -- requests

    @property
    def ends(self) -> Ends:
        """What stands here for what the client calls its engine, its model, and what it has shared."""
        return Ends(self.server, self.model, self._shared)

    def _shared(self, key: Any) -> Any:
        if isinstance(key, Shared):
            return next(name for name, each in self.shared.items() if each is key)
        return self.shared[key]

    def share(self, key: str, value: Any, device: torch.device) -> None:
        """An object that blocks use, and that is not sent with each of them."""
        there = value.to(device) if isinstance(value, Tensor | nn.Module) else value
        self.shared[key] = Shared(there)

    def begin(self, request_id: str, name: str, data: bytes) -> None:
        """A traced request has arrived, which the client calls `name`: its block runs up to what it first waits for."""
        if self.is_traced(request_id):
            return  # vLLM's second runner tells of a request again when it comes back from preemption
        if data in (PLAIN, PROBE):
            self.plain, self.recorder = self.recorder, Recorder(request_id, uncompiled=data == PLAIN)
            return
        companion = self._made(request_id, name, data)
        if companion is None:
            self._ids[name] = request_id
            return
        if isinstance(companion, BaseException):
            self._keep_fate(name, Fate.failed(companion))
            self._stillborn.append(request_id)
            return
        self.companions[request_id], self._ids[name] = companion, request_id
        with companion.guarded():
            companion.interleaver.start()

    def _made(self, request_id: str, name: str, data: bytes) -> Companion | BaseException | None:
        """A block's companion on every rank, or why there is none on any; None where the tables have taken it."""
        made: Companion | BaseException
        alike = None
        if self._ranks.size > 1:
            alike = Alike(self._ranks, Randomness(f"{self._seed} {name}", self.server.facts.device))
        try:
            shipment: Shipment = loads(data, self.ends)
            if isinstance(shipment.block, Interventions):
                if self.tables is not None and self.tables.take(request_id, name, shipment.block):
                    return None
                shipment = replace(shipment, block=shipment.block.block)
            made = Companion(shipment, self.server, self.model, self.slots, alike, self._foresight)
        except BaseException as error:  # of the user's own code, which runs when it is unpickled and bound
            made = error
        if alike is None or self._ranks.agree(type(made).__name__) or not isinstance(made, Companion):
            return made
        made.close()
        return TracingError(ELSEWHERE)

    def armed_for(self, request_ids: Iterable[str]) -> frozenset[Site]:
        """Where a graph over these requests is to be cut: sites of the forward pass, and neither norm nor logits."""
        wanted = frozenset[Site]().union(*(each.next_wanted for each in self.watching_for(request_ids)))
        return self.cuts(wanted)

    @staticmethod
    def cuts(sites: Iterable[Site]) -> frozenset[Site]:
        """Where a graph is cut for blocks that wait at these sites."""
        return frozenset(armed_site(site) for site in sites) - {FINAL_NORM, LOGITS}

    def watching_for(self, request_ids: Iterable[str]) -> list[Companion]:
        """Those of these requests whose rows must come by the taps."""
        found = (self.companions.get(request_id) for request_id in request_ids)
        return [companion for companion in found if companion is not None and companion.watches]

    def is_traced(self, request_id: str) -> bool:
        """Whether it has a block, or is in the tables."""
        return request_id in self.companions or (self.tables is not None and request_id in self.tables.requests)

    def has_edited(self, request_id: str) -> bool:
        """Whether something of a request, also of one that has ended here, may be other than the model made it."""
        companion = self.companions.get(request_id)
        if companion is not None:
            return companion.worker.wrote
        tabled = None if self.tables is None else self.tables.requests.get(request_id)
        return request_id in self._edited if tabled is None else _edits(tabled)

    def end(self, name: str) -> Fate:
        """What became of the block of a request that has ended, by the client's name for it. It is forgotten here."""
        self._end(self._ids.get(name, ""))
        return self.fates.pop(name, Fate())

    def ended(self, request_ids: Iterable[str]) -> None:
        """The scheduler knows nothing of these any more: fates are kept until they are asked for, or are too many."""
        for request_id in sorted(request_ids):  # vLLM has a set, which is in another order on each rank
            self._end(request_id)
            self._edited.discard(request_id)

    def _end(self, request_id: str) -> None:
        self._note_edited(request_id)
        companion = self.companions.pop(request_id, None)
        if companion is not None:
            del self._ids[companion.name]
            self._foresight.learn(companion.code, companion.came_to)
            self._keep_fate(companion.name, companion.finish())
        elif self.tables is not None and request_id in self.tables.requests:
            name = self.tables.requests[request_id].name
            del self._ids[name]
            self._keep_fate(name, self.tables.end(request_id))

    def drop(self, name: str) -> None:
        """Nobody waits for this request any more: its block ends where it waits."""
        request_id = self._ids.pop(name, "")
        self._note_edited(request_id)
        companion = self.companions.pop(request_id, None)
        if companion is not None:
            companion.close()
        if self.tables is not None:
            self.tables.drop(request_id)
        self.fates.pop(name, None)

    def _note_edited(self, request_id: str) -> None:
        if self.has_edited(request_id):
            self._edited.add(request_id)

    def _keep_fate(self, name: str, fate: Fate) -> None:
        self.fates[name] = fate
        while len(self.fates) > MOST_FATES:
            del self.fates[next(iter(self.fates))]

    @property
    def held(self) -> Mapping[str, int]:
        """What is alive here, for tests of what is left over."""
        waiting = sum(len(slot.workers) for slot in self.slots.values())
        alive = {"companions": self.companions, "fates": self.fates, "ids": self._ids, "shared": self.shared}
        alive |= {"tabled": {} if self.tables is None else self.tables.requests}
        return {"waiting": waiting, **{what: len(those) for what, those in alive.items()}}

    def keep(self, site: Site, x: Tensor, residual: Tensor | None) -> None:
        """Shows the probe what passes, if this is its pass."""
        if self.recorder is not None and self.recorder.rows is not None:
            self.recorder.keep(site, x, residual)

    # -- passes

    @contextmanager
    def watching(self, rows: Sequence[Row], total: int) -> Generator[None]:
        """A forward pass over these rows of the batch's requests, of `total`; its steps end with `settle`."""
        self.clock += 1
        probed = rows_of(self.recorder, rows)
        placed = of_placed(self.companions, rows)
        tabled = None if self.tables is None else _tabled(self.tables, rows, total)
        watched = placed or probed is not None or tabled is not None
        self.now = ForwardPass(self, self.clock, placed, total, tabled) if watched else None
        if self.recorder is not None:
            self.recorder.rows = probed
        if self.now is None:
            yield
            return
        self.now.begin()
        token = NOW.set(self.now)
        try:
            yield
        finally:
            NOW.reset(token)

    def settle(self) -> Mapping[str, str]:
        """The pass is over, its logits included: which requests end with it, and why."""
        now, self.now = self.now, None
        if self.recorder is not None and self.recorder.rows is not None:
            self.recorder.rows, self.recorder.done = None, True
        ended, self._stillborn = dict.fromkeys(self._stillborn, "error"), []
        if now is None:
            return ended
        now.end()
        for placed in now.placed:
            if (verdict := placed.companion.verdict) is not None:
                ended[placed.request_id] = verdict
        return ended

    def logits(self, logits: Tensor | None) -> None:
        """The logits of the pass have been computed, one row per request of the batch."""
        if self.now is not None and logits is not None:
            self.now.meet_logits(logits)

    def final_norm(self, hidden_states: Any) -> None:
        """What the model's forward returned: the final norm's output."""
        if self.now is not None and isinstance(hidden_states, Tensor):
            self.keep(FINAL_NORM, hidden_states, None)
            self.now.meet(self.slots[FINAL_NORM], hidden_states, None)


def of_placed(requests: Mapping[str, Companion], rows: Sequence[Row]) -> list[Placed]:
    """Those rows that traced requests own: (request id, first row, how many, first position), in the batch's order."""
    return [
        Placed(request_id, index, first, count, position, requests[request_id])
        for index, (request_id, first, count, position) in enumerate(rows)
        if request_id in requests and count
    ]


def _edits(tabled: Tabled) -> bool:
    """Whether there is more among its operations than what keeps rows."""
    form = tabled.program.form
    ops = form.part(frozenset(form.positions)).by_site.values()
    return any(op.kind in EDITS for of_site in ops for op in of_site)


def _tabled(tables: Tables, rows: Sequence[Row], total: int) -> TablePass | None:
    """The rows of requests that are in the tables; None where there are none."""
    if not tables.requests:
        return None
    owned = [
        Owned(tables.requests[request_id], first, count, position)
        for request_id, first, count, position in rows
        if request_id in tables.requests and count
    ]
    return TablePass(tables, owned, total) if owned else None
