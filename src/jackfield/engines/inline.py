"""What engines have in common whose forward pass hands every value to a tap, in the contract's shape.

A value passes as [batch, ...], padded on the left, so that on its token axis and on its key axis a request's own part
is the last. Queries and the cached keys and values pass together, since blocks read them in any order; this step's
keys and values are the last rows of the cached ones, and an edit of either is an edit of the same memory.

An engine runs a batch with an `InlineRun`, and serves its values through an `InlineChannel` each.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Protocol

import torch
from greenlet import getcurrent
from jaxtyping import Float, Int
from torch import Tensor

from jackfield.engines.company import Company
from jackfield.engines.engine import Engine, Outcome, Request
from jackfield.engines.progress import Progress
from jackfield.engines.request import Logprob
from jackfield.interleave.channel import WHOLE, Channel, Selection
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Worker
from jackfield.values.value import Value

OPERANDS = (
    "attention_queries_prerotary",
    "attention_keys_prerotary",
    "attention_queries",
    "attention_cached_keys",
    "attention_cached_values",
)
"""What passes together."""
_PART_OF = {
    "attention_keys": "attention_cached_keys",
    "attention_values": "attention_cached_values",
    "attention_head_results": "attention_premix",
    "next_token_probabilities": "logits",
}
Derivation = Callable[[Tensor], Tensor]


def place(layer: int | None) -> str:
    """What a value's path and name begin with."""
    return "" if layer is None else f"layers.{layer}"


def site_of(name: str, layer: int | None) -> Site:
    """Where the tensor `name` passes; the operands of attention have one site for all."""
    return Site(place(layer), Port.ATTEND) if name in OPERANDS else Site(place(layer), Port.OUTPUT, name)


class Tap(Protocol):
    """Who listens to a model's values. On several ranks all must answer alike: what is shared out is gathered first."""

    def listens(self, name: str, layer: int | None) -> bool:
        """Whether this value is wanted now; asked each time it comes. `layer` is None on the root."""
        ...

    def operands(self, tensors: Mapping[str, Tensor], layer: int | None) -> Mapping[str, Tensor]:
        """Values that pass together, by name, in the contract's shape, or one alone, as the model is to go on with.

        Each is the very tensor that was given where nothing is edited, else another of its shape and dtype. Tensors
        are the model's own, perhaps views of its cache: copy one before you edit or keep it.
        """
        ...


class Passing:
    """The tensors of one meeting, by name: the model's own, until a block writes to one and a copy takes its place."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._given = tensors

    def writable(self, name: str) -> Tensor:
        """The tensor, as a copy that the model will go on with."""
        if self.tensors[name] is self._given[name]:
            self.tensors[name] = self._given[name].clone()
        return self.tensors[name]


class InlineTap:
    """Where the values of one run meet its blocks. Code of a block, and other threads, may run the model untouched."""

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver

    @property
    def waited(self) -> frozenset[Site]:
        """Where blocks wait in this step. Only a meeting changes it."""
        step, workers = self._interleaver.step, self._interleaver.workers
        waiting = [worker.slot for worker in workers if not worker.done and worker.waiting_step == step]
        return frozenset(slot.site for slot in waiting if slot is not None)

    def listens(self, name: str, layer: int | None) -> bool:
        """Whether a block waits for this value; where none does, it has gone by."""
        if getcurrent() is not self._interleaver.home:
            return False
        slot = self._interleaver.slots[site_of(name, layer)]
        if not slot.workers:
            slot.passed = self._interleaver.step
        return bool(slot.workers)

    def __call__(self, name: str, layer: int | None, value: Tensor) -> Tensor:
        """`value` as the blocks leave it: itself where nothing was edited."""
        return self.operands({name: value}, layer)[name] if self.listens(name, layer) else value

    def operands(self, tensors: Mapping[str, Tensor], layer: int | None) -> Mapping[str, Tensor]:
        """The same for several that pass together: {OPERANDS: [batch, head, token or key, width]}."""
        name = next(iter(tensors))
        if not self.listens(name, layer):
            return tensors
        slot, passing = self._interleaver.slots[site_of(name, layer)], Passing(tensors)
        slot.passed = self._interleaver.step
        self._interleaver.meet(slot, passing)
        return passing.tensors


class InlineChannel(Channel):
    """A value as it passes: a request's rows and keys cut out of it by the value's axes, and put back."""

    def __init__(self, value: Value, layer: int | None) -> None:
        self.name = f"{place(layer)}.{value.name}".lstrip(".")
        self.value, self.writable = value, value.access == "rw"
        self.tensor = _PART_OF.get(value.name, value.name)
        self.memory = f"{place(layer)}.{self.tensor}"
        self.site = site_of(self.tensor, layer)

    def read(self, passing: Passing, worker: Worker, selection: Selection) -> Tensor:
        tensor = passing.tensors[self.tensor]
        if torch.is_grad_enabled() and not self.writable and selection == WHOLE and worker.batch_size == 1:
            return tensor  # the very node that the model goes on from: a copy cannot be put in its place
        view = self._view(tensor, worker)
        return (view if selection == WHOLE else view[self._mesh(view, selection)]).clone()

    def write(self, passing: Passing, worker: Worker, selection: Selection, value: Tensor) -> None:
        view = self._view(passing.writable(self.tensor), worker)
        view[... if selection == WHOLE else self._mesh(view, selection)] = value

    def _view(self, tensor: Tensor, worker: Worker) -> Tensor:
        """The request's own part of a tensor of the batch."""
        own = tensor[worker.rows.index : worker.rows.index + 1]
        step = worker.waiting_step  # of what passes; `worker.step` is another already where a loop has ended
        lengths = {"t": worker.rows.num_tokens(step), "k": worker.rows.num_keys(step)}
        for axis, letter in enumerate(self.value.axes.split()):
            if letter in lengths:
                own = own.narrow(axis, own.shape[axis] - lengths[letter], lengths[letter])
        return own

    def _mesh(self, view: Tensor, selection: Selection) -> tuple[Tensor, ...]:
        """Indices, one per axis, that pick the selection and keep every axis."""
        picked = {self.value.head_axis: selection.heads, self.value.token_axis: selection.tokens}
        indices = [
            torch.tensor(picked.get(axis) or range(size), device=view.device) for axis, size in enumerate(view.shape)
        ]
        return tuple(each.view(-1, *[1] * (view.ndim - 1 - axis)) for axis, each in enumerate(indices))


class DerivedChannel(InlineChannel):
    """A value that can be read only: a function of what passes, row by row, such as the softmax of the logits."""

    def __init__(self, value: Value, layer: int | None, derivation: Derivation) -> None:
        super().__init__(value, layer)
        self._derivation = derivation

    def read(self, passing: Passing, worker: Worker, selection: Selection) -> Tensor:
        whole = self._derivation(self._view(passing.tensors[self.tensor], worker))
        return whole if selection == WHOLE else whole[self._mesh(whole, selection)]


class Forward(Protocol):
    """A model's forward pass: `tokens`, after `columns` that it has seen, and each row's padding in; logits out."""

    def __call__(
        self, tokens: Int[Tensor, "batch token"], columns: int, pads: Sequence[int], tap: InlineTap
    ) -> Float[Tensor, "batch vocab"]:
        """The logits of the last token of every row."""
        ...


class Chooser(Protocol):
    """What makes tokens of logits."""

    def __call__(self, logits: Float[Tensor, "batch vocab"], progress: Sequence[Progress]) -> Sequence[int]:
        """The next token of every row."""
        ...

    def logprobs(self, sample: int) -> list[dict[int, Logprob]] | None:
        """What it noted of one row; None where nobody asked."""
        ...


class InlineRun:
    """One batch of requests through an inline engine: its blocks, its steps, its completions."""

    def __init__(self, engine: Engine, requests: Sequence[Request], eos_ids: frozenset[int]) -> None:
        self.company = Company(engine, requests)
        self._device = engine.facts.device
        samples = range(len(self.company.samples))
        self.prompts = [self.company.token_ids(sample) for sample in samples]
        width = max(map(len, self.prompts))
        self.pads = [width - len(prompt) for prompt in self.prompts]
        self.progress = [
            Progress(prompt, sample.sampling, eos_ids, engine.tokenizer)
            for prompt, sample in zip(self.prompts, self.company.samples, strict=True)
        ]
        self.interleaver = Interleaver(self.company.workers_of(samples, self.pads), lambda slot: None)
        self.tap = InlineTap(self.interleaver)
        self._columns = 0
        self.input_ids = torch.tensor(
            [[0] * pad + list(prompt) for pad, prompt in zip(self.pads, self.prompts, strict=True)],
            device=self._device,
        )

    def run(self, forward: Forward, choose: Chooser) -> list[Outcome]:
        """Steps until every sample has ended; blocks are ended with the run, whatever ends it."""
        try:
            self.interleaver.start()
            for step in count():
                self._step(step, forward, choose)
                if all(each.finish_reason is not None for each in self.progress):
                    break
            noted = [each.completion(choose.logprobs(sample)) for sample, each in enumerate(self.progress)]
            return self.company.outcomes(noted)
        finally:
            self.interleaver.close()

    def _step(self, step: int, forward: Forward, choose: Chooser) -> None:
        self.interleaver.begin(step)
        logits = forward(self.input_ids, self._columns, self.pads, self.tap)
        self.interleaver.end()
        self._columns += self.input_ids.shape[1]
        chosen = choose(logits.detach(), self.progress)
        for sample, token_id in enumerate(chosen):
            self._push(sample, token_id)
        self.input_ids = torch.tensor(chosen, device=self._device)[:, None]

    def _push(self, sample: int, token_id: int) -> None:
        progress = self.progress[sample]
        if progress.finish_reason is not None:
            return
        progress.push(token_id, self.company.verdict(sample))
        if progress.finish_reason is not None and sample in self.company.workers:
            self.interleaver.finish(self.company.workers[sample])
