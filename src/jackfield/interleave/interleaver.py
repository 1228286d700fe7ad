"""The meeting of blocks and a forward pass: who waits where, and what has gone by.

An engine announces each step (`begin`, `end`) and each tensor that passes (`meet`). A worker that waits there runs on,
in the engine's own thread, until it waits for the next. A slot with nobody waiting costs the engine one look.
"""

from collections.abc import Callable, Iterable
from typing import Any

from greenlet import getcurrent

from jackfield.errors import NotReached, OutOfOrder
from jackfield.interleave.channel import Slot, Slots
from jackfield.interleave.worker import Worker


class Interleaver:
    """The workers of one batch beside one run of the engine.

    Engines whose requests go through their steps each in its own time have one for each request, and give all of them
    the same `slots`: then a tap looks at one slot, whoever waits there.
    """

    def __init__(
        self, workers: Iterable[Worker], open_slot: Callable[[Slot], None], slots: Slots | None = None
    ) -> None:
        self.step = -1
        self.clock = -1  # of the forward pass that is going on; Slot.passed holds the one in which a site went by
        self.home = getcurrent()  # where the engine runs; blocks, and other threads, are elsewhere
        self._open_slot = open_slot
        self.workers = tuple(workers)
        self.slots = Slots() if slots is None else slots
        for worker in self.workers:
            worker.interleaver = self

    def open(self, slot: Slot) -> None:
        """Has the engine look at a site from now on, since a block waits there."""
        self._open_slot(slot)
        slot.open = True

    @property
    def alive(self) -> bool:
        """Whether a block is still running."""
        return any(not worker.done for worker in self.workers)

    def start(self) -> None:
        """Runs every block up to what it first waits for."""
        for worker in self.workers:
            worker.resume(None)

    def begin(self, step: int, clock: int | None = None) -> None:
        """A forward pass begins, the `clock`-th of the engine; without one, passes are counted as steps are."""
        self.step, self.clock = step, step if clock is None else clock
        for worker in self.workers:
            if worker.done or worker.waiting_step != step:
                continue
            if worker.slot is None:
                worker.resume(True)
            else:
                worker.slot.workers.append(worker)

    def meet(self, slot: Slot, passing: Any) -> None:
        """A tensor passes `slot`: each worker that waits there sees it. `passing` is the engine's own description."""
        workers, slot.workers = slot.workers, []
        for worker in workers:
            worker.resume(passing)

    def end(self) -> None:
        """The forward pass is over: whoever still waits for something in it waited for what did not come."""
        for worker in self.workers:
            while not worker.done and worker.slot is not None and worker.waiting_step == self.step:
                worker.slot.workers.remove(worker)
                worker.throw(NotReached(f"{worker.wanted} did not come in step {self.step}: the model ran without it."))

    def too_late(self, worker: Worker) -> None:
        """Tells a worker that what it waits for in this step has gone by: for engines that find out after the fact."""
        if worker.slot is not None:
            worker.slot.workers.remove(worker)
        step = worker.waiting_step
        worker.throw(
            OutOfOrder(f"{worker.wanted} of step {step} has gone by. Read values in the order of the forward pass.")
        )

    def finish(self, worker: Worker) -> None:
        """The request has no more steps: its step loop ends, and a read of a later step is NotReached."""
        while not worker.done:
            if worker.slot is None:
                worker.resume(False)
            else:
                waited = f"{worker.wanted} was waited for in step {worker.waiting_step}"
                message = f"{waited}, but the request ended after step {self.step}."
                worker.throw(NotReached(message))

    def close(self) -> None:
        """Ends every block that is still running, wherever it is. May be done again, where an interrupt ended it."""
        for worker in self.workers:
            worker.kill()
            vars(worker).pop("interleaver", None)
        self.workers = ()
        self.slots = Slots()
