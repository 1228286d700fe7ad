"""The blocks that accompany a batch: one worker per sample of each request, and what becomes of them.

What passes by a worker, and when, is its engine's own business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jackfield.engines.engine import Engine, Outcome, Request
from jackfield.engines.request import Completion, FinishReason, Sampling
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker
from jackfield.trace.gradient import in_graph
from jackfield.trace.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of one request: its sampling has n=1. `request` counts within the batch."""

    request: int
    sampling: Sampling


class Company:
    """The samples of a batch, and the workers and tracers of those that have a block, by the sample's number."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine, self.requests = engine, requests
        self.samples = [
            Sample(number, sampling)
            for number, request in enumerate(requests)
            for sampling in request.sampling.samples()
        ]
        self.workers: dict[int, Worker] = {}
        self._tracers: dict[int, Tracer] = {}

    @property
    def names(self) -> frozenset[str]:
        """Every name that a block mentions."""
        return frozenset[str]().union(*(request.block.names for request in self.requests if request.block is not None))

    def token_ids(self, sample: int) -> tuple[int, ...]:
        """The prompt of a sample."""
        return self.requests[self.samples[sample].request].prompt_token_ids

    def workers_of(self, samples: Sequence[int], pads: Sequence[int]) -> list[Worker]:
        """Workers for those samples that have a block. All run together, `pads[i]` columns of padding before one."""
        made = [self._worker(sample, row, pads[row], len(samples)) for row, sample in enumerate(samples)]
        return [worker for worker in made if worker is not None]

    def verdict(self, sample: int) -> FinishReason | None:
        """Why a sample ends after this step: its block stopped it, or failed."""
        worker = self.workers.get(sample)
        if worker is None:
            return None
        return "error" if worker.error is not None else "stopped" if worker.stopped else None

    def outcomes(self, completions: Sequence[Completion]) -> list[Outcome]:
        """One Outcome per request, of one completion per sample. To be asked once: errors are handed over."""
        outcomes = [Outcome() for _ in self.requests]
        for number, completion in enumerate(completions):
            self._add(outcomes[self.samples[number].request], number, completion)
        return outcomes

    def _worker(self, sample: int, row: int, pad: int, batch_size: int) -> Worker | None:
        request = self.requests[self.samples[sample].request]
        if request.block is None:
            return None
        device = self._engine.facts.device
        worker = Worker(Rows(row, pad, len(request.prompt_token_ids)), batch_size)
        text: str | None = getattr(request.prompt, "text", None)
        tracer = Tracer(worker, device, text, request.prompt_token_ids, gradients=request.gradients)
        worker.owner, worker.finalize = self._engine, tracer.finalize
        body = request.block.bind(tracer, device, request.model)
        worker.body = in_graph(body) if request.gradients else body
        self.workers[sample], self._tracers[sample] = worker, tracer
        return worker

    def _add(self, outcome: Outcome, sample: int, completion: Completion) -> None:
        worker = self.workers.get(sample)
        error = worker.error if worker is not None else None
        outcome.completions.append(completion if error is None else replace(completion, finish_reason="error"))
        outcome.saved.append(self._tracers[sample].saved if worker is not None and error is None else {})
        outcome.returned.append(worker.returned if worker is not None else None)
        outcome.errors.append(error)
        if worker is not None:
            worker.error = worker.returned = None
