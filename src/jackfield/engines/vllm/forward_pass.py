"""One forward pass over a batch with traced requests in it: where their rows are, and who waits at each tap."""

from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from inspect import Signature
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jackfield.engines.vllm.companion import Companion, Guard
from jackfield.engines.vllm.gathering import Halves, Tapped, gather, in_groups, write_back
from jackfield.engines.vllm.raw import RawPassing
from jackfield.engines.vllm.tables.buffers import TablePass
from jackfield.interleave.channel import Slot
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Worker

if TYPE_CHECKING:
    from jackfield.engines.vllm.host import Host
    from jackfield.engines.vllm.op_tap import OpTap

FINAL_NORM = Site("", Port.OUTPUT, "hidden_states")
LOGITS = Site("", Port.OUTPUT, "logits")
"""What passes outside the model's forward, where no tap is."""


class Placed:
    """A traced request in a pass: `count` rows from `first` on, at absolute positions from `position` on.

    `index` counts the requests of the batch. Rows of positions that its block has seen are computed once more, after a
    preemption: only what is new belongs to the block's step. `fresh` are the rows of that, within the batch.
    """

    __slots__ = ("companion", "count", "first", "fresh", "index", "position", "request_id")

    def __init__(
        self, request_id: str, index: int, first: int, count: int, position: int, companion: Companion
    ) -> None:
        self.request_id, self.index, self.companion = request_id, index, companion
        self.first, self.count, self.position = first, count, position
        again = companion.seen - position
        self.fresh = slice(first if again <= 0 else first + min(count, again), first + count)

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
        self.put_back = [each for each in placed if each.companion.kept]  # who lost their place in the caches
        self.tabled = tabled
        self._again = self._replayed = False
        self._numbered = host.numbered
        self.kept: dict[Site, Tensor] = {}  # queries and keys before the rotary embedding, for blocks that name them
        self._keeping = host.early if any(each.companion.early for each in placed) else frozenset[Site]()
        self._looks = bool(self._keeping) or host.recorder is not None  # at every tap, whoever waits there

    def begin(self) -> None:
        """The step of every request with new rows begins; of one that its block has ended a step may be under way."""
        for each in self.placed:
            companion, last = each.companion, each.position + each.count - 1
            if last >= companion.seen and not companion.worker.stopped:
                companion.last = None
                with Guard(companion):
                    companion.interleaver.begin(companion.step_at(last), self.clock)

    def end(self) -> None:
        """The pass is over: what waited for something in it in vain is told so."""
        if self.tabled is not None:
            self.tabled.end(replayed=self._replayed)
        for each in self.placed:
            companion, last = each.companion, each.position + each.count
            if last > companion.seen:
                if companion.worker.slot is not None:
                    with Guard(companion):
                        companion.interleaver.end()
                companion.seen, companion.kept = last, {}
                companion.worker.written.clear()

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
            with Guard(companion):
                companion.interleaver.too_late(worker)
        return False

    @property
    def is_again(self) -> bool:
        """Whether it runs a second time."""
        return self._again

    def begin_again(self) -> None:
        """The same pass runs a second time, with every tap alive: what blocks wrote in the first is written again."""
        self._again, self._replayed = True, False
        self._looks = True

    @contextmanager
    def in_graphs(self) -> Generator[None]:
        """While it is open, taps that are alive have tables do what they would do in a graph."""
        if self.tabled is not None:
            self.tabled.in_graphs = True
        try:
            yield
        finally:
            if self.tabled is not None:
                self.tabled.in_graphs = False

    def before(self, tap: "OpTap", q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> None:
        """An attention op is about to run."""
        tap.before(self, q, k, v, cache)

    def behind(self, tap: "OpTap", q: Tensor, k: Tensor, v: Tensor, cache: Tensor, output: Tensor) -> None:
        """An attention op has run."""
        tap.behind(self, q, k, v, cache, output)

    def arrived(self, slot: Slot) -> list[Worker]:
        """Who waits at a slot that passes. What a block wants here it may want again: graphs are cut there."""
        for worker in slot.workers:
            self.of[worker].companion.comes_to(slot.site)
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
        if self.tabled is not None:
            self.tabled.tap(site, x, residual)
        self.at_cut(site, x, residual)

    def at_cut(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        """The same, for blocks alone: where a graph is cut, what its tables say has been done in it."""
        slot = self._numbered[site]
        slot.passed = self.clock
        if slot.workers or self._looks:
            self.meet(slot, x, residual)  # most taps have nobody, and cost that look

    def meet(self, slot: Slot, x: Tensor, residual: Tensor | None) -> None:
        """Each block that waits at `slot` sees its own rows."""
        slot.passed = self.clock
        x, residual = _flat(x, self.total), None if residual is None else _flat(residual, self.total)
        self.host.keep(slot.site, x, residual)
        tapped = Tapped(x, residual, delays=self.host.is_alone)
        self._write_again(slot, tapped)
        if slot.site in self._keeping:
            self.kept[slot.site] = x.clone()
        if slot.workers:
            workers, slot.workers = slot.workers, []
            for group in in_groups([self._arrive(worker, slot, tapped) for worker in workers]):
                self._resume(group)

    def _write_again(self, slot: Slot, tapped: Tapped) -> None:
        again = [self._halves(worker, tapped) for worker in self.doing_again(slot)]
        for each in again:
            self.do_again(each.companion.worker, slot, each)
        write_back(again, self._settle)

    def _arrive(self, worker: Worker, slot: Slot, tapped: Tapped) -> Halves:
        """A block waits here, and may do so again: graphs are cut there."""
        placed = self.of[worker]
        placed.companion.comes_to(slot.site)
        return Halves(tapped, placed.fresh, placed.companion)

    def _resume(self, waiting: Sequence[Halves]) -> None:
        """Blocks run on, each with its rows."""
        if self.host.is_alone:  # on several ranks each read of a block is a message
            with suppress(Exception):  # each then reads for itself, and whose copy cannot be made hears of it
                gather(waiting)
        for each in waiting:
            companion = each.companion
            with Guard(companion):
                companion.worker.resume(each)
        write_back(waiting, self._settle)

    def _settle(self, edited: Halves) -> None:
        with Guard(edited.companion):
            edited.settle()

    def _halves(self, worker: Worker, tapped: Tapped) -> Halves:
        placed = self.of[worker]
        return Halves(tapped, placed.fresh, placed.companion)

    def meet_logits(self, logits: Tensor) -> None:
        """One row per request, in the batch's order."""
        slot, tapped = self.host.slots[LOGITS], Tapped(logits)
        slot.passed = self.clock
        workers, slot.workers = slot.workers, []
        for worker in workers:
            with self.guarded(worker):
                placed = self.of[worker]
                row = slice(placed.index, placed.index + 1)
                worker.resume(Halves(tapped, row, placed.companion))

    def meet_raw(self, slot: Slot, nest: Any, signature: Signature | None) -> None:
        """What a module was called with, or gave."""
        slot.passed = self.clock
        workers, slot.workers = slot.workers, []
        for worker in workers:
            with self.guarded(worker):
                worker.resume(RawPassing(nest, signature, self.rows_of(worker), self.total))

    def guarded(self, worker: Worker) -> Guard:
        """In which whatever goes wrong is this block's own."""
        return Guard(self.of[worker].companion)

    def rows_of(self, worker: Worker) -> slice:
        """A request's rows in the batch."""
        return self.of[worker].fresh


def _flat(tensor: Tensor, rows: int) -> Tensor:
    """[row, width], heads beside each other: models that come from transformers have a batch axis of 1 before it."""
    own = tensor[0] if tensor.ndim > 2 and tensor.shape[0] == 1 != rows else tensor
    return own.flatten(1) if own.shape[0] == rows else own.new_empty(0, 0)  # several streams have no rows of one
