"""One traced request as a worker process has it: its block, the step it is at, and what is to be done again."""

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from jackfield.engines.vllm.shipping import Shipment
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Site
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Slot, Worker
from jackfield.trace.tracer import Tracer

RAW_NAMES: Final = frozenset({"input", "inputs", "output"})
PREROTARY: Final = frozenset({"attention_queries_prerotary", "attention_keys_prerotary"})
DYNAMIC_NAMES: Final = frozenset({"getattr", "attrgetter", "read"})  # by which a block may read what it does not name


@dataclass(slots=True)
class Fate:
    """What became of a block, on its way back to the client."""

    saved: dict[str, Any] = field(default_factory=dict[str, Any])
    returned: Any = None
    error: Exception | None = None
    stopped: bool = False


class Companion:
    """A block beside one request. `seen` positions have passed it; a pass over earlier ones computes them again."""

    def __init__(self, shipment: Shipment, engine: Any, model: Any, slots: dict[Site, Slot]) -> None:
        device: torch.device = engine.facts.device
        self.prompt_length = len(shipment.prompt_token_ids)
        self.seen = 0
        self.writes: dict[tuple[int, int], Any] = {}  # by site's number and first position
        self.worker = Worker(Rows(0, 0, self.prompt_length))
        self.tracer = Tracer(self.worker, device, shipment.prompt, shipment.prompt_token_ids)
        self.worker.owner, self.worker.finalize = engine, self.tracer.finalize
        self.interleaver = Interleaver([self.worker], lambda slot: None, slots)
        self.raw = bool(shipment.block.names & RAW_NAMES)  # whether it may want what no tap has
        self.names_early = bool(shipment.block.names & PREROTARY)  # whether it wants what passes before it is asked for
        self.early = self.names_early or bool(shipment.block.names & DYNAMIC_NAMES)  # whether it may want that
        self.worker.body = shipment.block.bind(self.tracer, device, model)

    def step_at(self, position: int) -> int:
        """Which step the row at an absolute position belongs to."""
        return 0 if position < self.prompt_length else position - self.prompt_length + 1

    @property
    def verdict(self) -> str | None:
        """Why its request ends after this step."""
        return "error" if self.worker.error is not None else "stopped" if self.worker.stopped else None

    def finish(self) -> Fate:
        """The request has no more steps: what became of its block."""
        self.interleaver.finish(self.worker)
        worker = self.worker
        saved = self.tracer.saved if worker.error is None else {}
        fate = Fate(saved, worker.returned, worker.error, worker.stopped)
        worker.error = worker.returned = None
        self.close()
        return fate

    def close(self) -> None:
        """Ends the block where it is."""
        self.interleaver.close()
        self.writes.clear()
