"""The part of the vLLM engine that lives in each of its worker processes: traced requests beside the runner's passes.

The runner tells of each pass whose rows are where (`rows.py`); taps tell of tensors (`taps.py`). A request's step and
rows follow from absolute positions alone, so that nothing here depends on how the scheduler cut a batch.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from jackfield.engines.vllm.companion import Companion, Fate
from jackfield.engines.vllm.forward_pass import ForwardPass, Placed
from jackfield.engines.vllm.recorder import PROBE, Recorder, rows_of
from jackfield.engines.vllm.rows import Row
from jackfield.engines.vllm.shipping import Shipment, unpack
from jackfield.engines.vllm.taps import NOW
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Slot

FINAL_NORM = Site("", Port.OUTPUT, "hidden_states")
LOGITS = Site("", Port.OUTPUT, "logits")


class Host:
    """The traced requests of one worker process, by vLLM's request ids and by the client's names."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.slots: dict[Site, Slot] = {}
        self.numbered = [self.slot(site) for site in sites]
        self.companions: dict[str, Companion] = {}
        self.fates: dict[str, Fate] = {}  # of blocks that could not be begun
        self.clock = 0
        self.now: ForwardPass | None = None
        self.server: Any = None  # the engine whose parts blocks read, and the model over it
        self.model: Any = None
        self.recorder: Recorder | None = None
        self.early: Set[Site] = frozenset()  # what is kept until the attention op is there, for blocks that name it
        self._names: dict[str, str] = {}  # the client's name to vLLM's id

    def slot(self, site: Site) -> Slot:
        """The one slot of a site."""
        if site not in self.slots:
            self.slots[site] = Slot(site)
        return self.slots[site]

    # -- requests

    def begin(self, request_id: str, data: bytes) -> None:
        """A traced request has arrived: its block runs up to what it first waits for."""
        if request_id in self.companions:
            return  # vLLM's second runner tells of a request again when it comes back from preemption
        if data == PROBE:
            self.recorder = Recorder(request_id)
            return
        shipment: Shipment = unpack(data, self.server, self.model)
        self._names[shipment.name] = request_id
        try:
            companion = Companion(shipment, self.server, self.model, self.slots)
        except Exception as error:
            self.fates[request_id] = Fate(error=error)
            return
        self.companions[request_id] = companion
        companion.interleaver.start()

    def running(self, request_ids: Iterable[str]) -> list[Companion]:
        """Those of these requests that have a block which still runs."""
        found = (self.companions.get(request_id) for request_id in request_ids)
        return [companion for companion in found if companion is not None and not companion.worker.done]

    def end(self, name: str) -> Fate:
        """What became of the block of a request that has ended, by the client's name for it. It is forgotten here."""
        request_id = self._names.pop(name, "")
        companion = self.companions.pop(request_id, None)
        if companion is not None:
            return companion.finish()
        return self.fates.pop(request_id, Fate())

    @property
    def held(self) -> Mapping[str, int]:
        """What is alive here, for tests of what is left over."""
        waiting = sum(len(slot.workers) for slot in self.slots.values())
        return {"companions": len(self.companions), "fates": len(self.fates), "waiting": waiting}

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
        self.now = ForwardPass(self, self.clock, placed, total) if placed or probed is not None else None
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
        ended = dict.fromkeys(self.fates, "error")
        if now is None:
            return ended
        now.end()
        verdicts = {placed.request_id: placed.companion.verdict for placed in now.placed}
        return ended | {request_id: verdict for request_id, verdict in verdicts.items() if verdict is not None}

    def logits(self, logits: Tensor | None) -> None:
        """The logits of the pass have been computed, one row per request of the batch."""
        if self.now is not None and logits is not None:
            self.now.meet_logits(logits)

    def final_norm(self, hidden_states: Any) -> None:
        """What the model's forward returned: the final norm's output."""
        if self.now is not None and isinstance(hidden_states, Tensor):
            self.keep(FINAL_NORM, hidden_states, None)
            self.now.meet(self.slot(FINAL_NORM), hidden_states, None)


def of_placed(requests: Mapping[str, Companion], rows: Sequence[Row]) -> list[Placed]:
    """Those rows that traced requests own: (request id, first row, how many, first position), in the batch's order."""
    return [
        Placed(request_id, index, first, count, position, requests[request_id])
        for index, (request_id, first, count, position) in enumerate(rows)
        if request_id in requests and count
    ]
