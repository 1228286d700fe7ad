"""One forward pass over a batch with traced requests in it: where their rows are, and who waits at each tap."""

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import Signature
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jackfield.engines.vllm.companion import Companion
from jackfield.engines.vllm.passing import Halves
from jackfield.engines.vllm.raw import RawPassing
from jackfield.engines.vllm.tables.buffers import TablePass
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Slot, Worker

if TYPE_CHECKING:
    from jackfield.engines.vllm.host import Host
    from jackfield.engines.vllm.op_tap import OpTap

FINAL_NORM = Site("", Port.OUTPUT, "hidden_states")
LOGITS = Site("", Port.OUTPUT, "logits")
"""What passes outside the model's forward, where no tap is."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A traced request in a pass: `count` rows from `first` on, at absolute positions from `position` on.

    `index` counts the requests of the batch. Rows of positions that its block has seen are computed once more, after a
    preemption: only what is new belongs to the block's step.
    """

    request_id: str
    index: int
    first: int
    count: int
    position: int
    companion: Companion

    @property
    def fresh(self) -> slice:
        """The rows that the block has not seen, within the batch."""
        again = min(self.count, max(0, self.companion.seen - self.position))
        return slice(self.first + again, self.first + self.count)

    @property
    def again(self) -> slice:
        """The rows that it has seen, within the batch."""
        return slice(self.first, self.fresh.start)


class ForwardPass:
    """The pass that goes on now: taps come here."""

    def __init__(
        self, host: "Host", clock: int, placed: Sequence[Placed], total: int, tabled: TablePass | None = None
    ) -> None:
        self.host, self.clock, self.placed = host, clock, placed
        self.total = total  # rows of the batch, padding included
        self.of: Mapping[Worker, Placed] = {each.companion.worker: each for each in placed}
        self._fresh: Mapping[Worker, slice] = {each.companion.worker: each.fresh for each in placed}
        self.tabled = tabled
        self._again = self._replayed = False
        self.kept: dict[Site, Tensor] = {}  # queries and keys before the rotary embedding, for blocks that name them
        self._keeping = host.early if any(each.companion.early for each in placed) else frozenset[Site]()

    def begin(self) -> None:
        """The step of every request with new rows begins; of one that its block has ended a step may be under way."""
        for each in self.placed:
            last = each.position + each.count - 1
            if last >= each.companion.seen and each.companion.verdict is None:
                each.companion.last = None
                with each.companion.guarded():
                    each.companion.interleaver.begin(each.companion.step_at(last), self.clock)

    def end(self) -> None:
        """The pass is over: what waited for something in it in vain is told so."""
        if self.tabled is not None:
            self.tabled.end(replayed=self._replayed)
        for each in self.placed:
            last = each.position + each.count
            if last > each.companion.seen:
                with each.companion.guarded():
                    each.companion.interleaver.end()
                each.companion.seen, each.companion.kept = last, {}
                each.companion.worker.written.clear()

    def missed(self, tables: Set[Site]) -> bool:
        """Whether a block still waits for what a graph has passed by; one that comes too late is told so.

        To be asked when a graph has been replayed: sites at which it was not cut have gone by in silence, and so have
        those that are none of its `tables`.
        """
        self._replayed = True
        if self.tabled is not None and not self.tabled.sites <= tables:
            return True
        return bool([each for each in self.placed if self._misses(each)])  # all are asked: some are told

    def _misses(self, placed: Placed) -> bool:
        companion, worker = placed.companion, placed.companion.worker
        while not worker.done and worker.slot is not None and worker.waiting_step == companion.interleaver.step:
            site, order = worker.slot.site, self.host.order
            if site not in order:
                return False  # the logits, which come later
            if companion.last is None or order[site] >= order[companion.last]:
                return True
            with companion.guarded():
                companion.interleaver.too_late(worker)
        return False

    def begin_again(self) -> None:
        """The same pass runs a second time, with every tap alive: what blocks wrote in the first is written again."""
        self._again, self._replayed = True, False

    def before(self, tap: "OpTap", q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> None:
        """An attention op is about to run."""
        tap.before(self, q, k, v, cache)

    def behind(self, tap: "OpTap", q: Tensor, k: Tensor, v: Tensor, cache: Tensor, output: Tensor) -> None:
        """An attention op has run."""
        tap.behind(self, q, k, v, cache, output)

    def arrived(self, slot: Slot) -> list[Worker]:
        """Who waits at a slot that passes. What a block wants here it may want again: graphs are cut there."""
        for worker in slot.workers:
            self.of[worker].companion.came_to(slot.site)
        return slot.workers

    def doing_again(self, slot: Slot) -> list[Worker]:
        """Whose writes at a slot are to be done again."""
        if not self._again:
            return []
        return [each.companion.worker for each in self.placed if slot.site in each.companion.worker.written]

    def do_again(self, worker: Worker, slot: Slot, passing: Any) -> None:
        """Does a block's writes at a slot again."""
        with self.guarded(worker):
            self.of[worker].companion.worker.write_again(slot.site, passing)

    def tap(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        """A tensor, or the stream's two halves, passes the tap of this number."""
        slot = self.host.numbered[site]
        slot.passed = self.clock
        if self.tabled is not None:
            self.tabled.tap(site, x, residual)
        if slot.workers or self._keeping or self._again or self.host.recorder is not None:
            self.meet(slot, x, residual)  # most taps have nobody, and cost that look

    def meet(self, slot: Slot, x: Tensor, residual: Tensor | None) -> None:
        """Each block that waits at `slot` sees its own rows."""
        slot.passed = self.clock
        x, residual = _flat(x, self.total), None if residual is None else _flat(residual, self.total)
        self.host.keep(slot.site, x, residual)
        for worker in self.doing_again(slot):
            self.do_again(worker, slot, self._cut(worker, x, residual))
        if slot.site in self._keeping:
            self.kept[slot.site] = x.clone()
        if not slot.workers:
            return
        workers, slot.workers = self.arrived(slot), []
        for worker in workers:
            with self.guarded(worker):
                worker.interleaver.resume(worker, self._cut(worker, x, residual))

    def _cut(self, worker: Worker, x: Tensor, residual: Tensor | None) -> Halves:
        rows = self._fresh[worker]
        return Halves(x[rows], None if residual is None else residual[rows])

    def meet_logits(self, logits: Tensor) -> None:
        """One row per request, in the batch's order."""
        slot = self.host.slot(LOGITS)
        slot.passed = self.clock
        workers, slot.workers = slot.workers, []
        for worker in workers:
            with self.guarded(worker):
                index = self.of[worker].index
                worker.interleaver.resume(worker, Halves(logits[index : index + 1]))

    def meet_raw(self, slot: Slot, nest: Any, signature: Signature | None) -> None:
        """What a module was called with, or gave."""
        slot.passed = self.clock
        workers, slot.workers = slot.workers, []
        for worker in workers:
            with self.guarded(worker):
                worker.interleaver.resume(worker, RawPassing(nest, signature, self._fresh[worker], self.total))

    def guarded(self, worker: Worker) -> AbstractContextManager[None]:
        """In which whatever goes wrong is this block's own."""
        return self.of[worker].companion.guarded()

    def rows_of(self, worker: Worker) -> slice:
        """A request's rows in the batch."""
        return self._fresh[worker]


def _flat(tensor: Tensor, rows: int) -> Tensor:
    """[row, width], heads beside each other: models that come from transformers have a batch axis of 1 before it."""
    own = tensor[0] if tensor.ndim > 2 and tensor.shape[0] == 1 != rows else tensor
    return own.flatten(1) if own.shape[0] == rows else own.new_empty(0, 0)  # several streams have no rows of one
