"""One traced request as a worker process has it: its block, the step it is at, and what it must not lose."""

import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Final, cast

import torch
from torch import Tensor

from jackfield.engines.vllm.alike import Alike, AlikeWorker
from jackfield.engines.vllm.foresight import Foresight
from jackfield.engines.vllm.interrupts import is_apart
from jackfield.engines.vllm.shipping import Shipment
from jackfield.engines.vllm.traced_worker import TracedWorker
from jackfield.interleave.channel import Slots
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Site
from jackfield.interleave.step import Rows
from jackfield.interventions.block import InterventionBlock
from jackfield.trace.capture import Block
from jackfield.trace.tracer import Tracer
from jackfield.values.tree import RAW_NAMES

PREROTARY: Final = frozenset({"attention_queries_prerotary", "attention_keys_prerotary"})
DYNAMIC_NAMES: Final = frozenset({"getattr", "attrgetter", "read"})  # by which a block may read what it does not name


@dataclass(slots=True)
class Fate:
    """What became of a block, on its way back to the client. `interrupt`: what ended it was no error.

    `printed`: what it printed in another process than the client's. `is_data`: there was no block, and nothing in
    `saved` but tensors of their own.
    """

    saved: dict[str, Any] = field(default_factory=dict[str, Any])
    returned: Any = None
    error: Exception | None = None
    stopped: bool = False
    interrupt: BaseException | None = None
    printed: str = ""
    is_data: bool = False

    @classmethod
    def failed(cls, error: BaseException, printed: str = "") -> "Fate":
        """Of a block that ended in this."""
        is_error = isinstance(error, Exception)
        return cls(error=error, printed=printed) if is_error else cls(interrupt=error, printed=printed)


class Guard:
    """Whatever goes wrong within ends one request, and neither the others nor the engine.

    What a block prints in another process than its client's is kept; in the client's it is shown.
    """

    __slots__ = ("_companion", "_stdout")

    def __init__(self, companion: "Companion") -> None:
        self._companion = companion

    def __enter__(self) -> None:
        if self._companion.printed is not None:
            self._stdout, sys.stdout = sys.stdout, self._companion.printed

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if self._companion.printed is not None:
            sys.stdout = self._stdout
        if error is not None:
            self._companion.failed(error)
        return True


class Companion:
    """A block beside one request. `seen` positions have passed it; a pass over earlier ones computes them again.

    `kept` is what the caches held of those when the request was preempted: {layer: (keys, values)}. A block runs once
    per position, and what it edited is in these, since nothing else of an earlier position reaches a later one.
    """

    def __init__(
        self,
        shipment: Shipment,
        engine: Any,
        model: Any,
        slots: Slots,
        alike: Alike | None,
        foresight: Foresight,
    ) -> None:
        device: torch.device = engine.facts.device
        self.name = shipment.name
        self.prompt_length = len(shipment.prompt_token_ids)
        self.seen = 0
        self.kept: Mapping[str, tuple[Tensor, Tensor]] = {}
        self.came_to: set[Site] = set()
        self.last: Site | None = None  # the site that it came to last, in this step
        rows = Rows(0, 0, self.prompt_length)
        self.worker = TracedWorker(rows) if alike is None else AlikeWorker(rows, alike)
        self.tracer = Tracer(self.worker, device, shipment.prompt, shipment.prompt_token_ids)
        self.worker.owner, self.worker.finalize = engine, self.tracer.finalize
        self.interleaver = Interleaver([self.worker], lambda slot: None, slots)
        block = cast("Block | InterventionBlock", shipment.block)
        self.code = block.code if isinstance(block, Block) else None
        self.foreseen = foresight.of(self.code)  # where it will wait, if it does what others of its code did
        self.raw = bool(block.names & RAW_NAMES)  # whether it may want what no tap has
        self.names_early = bool(block.names & PREROTARY)  # whether it wants what passes before it is asked for
        self.early = self.names_early or bool(block.names & DYNAMIC_NAMES)  # whether it may want that
        self.worker.body = block.bind(self.tracer, device, model)
        self._failure: BaseException | None = None
        self.printed = StringIO() if is_apart() else None

    def step_at(self, position: int) -> int:
        """Which step the row at an absolute position belongs to."""
        return 0 if position < self.prompt_length else position - self.prompt_length + 1

    def comes_to(self, site: Site) -> None:
        """Its block waits at a site that passes."""
        self.last = site
        self.came_to.add(site)

    @property
    def next_wanted(self) -> Set[Site]:
        """Where its block will wait in its next step, as far as is known: what is foreseen, where it was, and is."""
        known = self.came_to | (self.foreseen or frozenset[Site]())
        slot = self.worker.slot
        return known if slot is None or self.worker.done else known | {slot.site}

    @property
    def is_known(self) -> bool:
        """Whether there is something to be known of its next step: it has made one, or others have."""
        return self.seen >= self.prompt_length or self.foreseen is not None

    @property
    def watches(self) -> bool:
        """Whether passes over its rows must come by the taps."""
        return not self.worker.done or bool(self.kept)

    @property
    def verdict(self) -> str | None:
        """Why its request ends after this step."""
        if self._failure is not None or self.worker.error is not None:
            return "error"
        return "stopped" if self.worker.stopped else None

    def guarded(self) -> Guard:
        """Whatever goes wrong within ends this request, and neither the others nor the engine."""
        return Guard(self)

    def failed(self, error: BaseException) -> None:
        """Something went wrong beside the block, or it was interrupted: it ends where it is."""
        self._failure = error
        self.close()

    def finish(self) -> Fate:
        """The request has no more steps: what became of its block."""
        with self.guarded():
            self.interleaver.finish(self.worker)
        fate = self._fate()
        self.worker.error = self.worker.returned = self._failure = None
        self.close()
        return fate

    def _fate(self) -> Fate:
        failure = self._failure if self._failure is not None else self.worker.error
        printed = "" if self.printed is None else self.printed.getvalue()
        if failure is not None:
            return Fate.failed(failure, printed)
        return Fate(self.tracer.saved, self.worker.returned, stopped=self.worker.stopped, printed=printed)

    def close(self) -> None:
        """Ends the block where it is."""
        self.interleaver.close()
        self.kept = {}
