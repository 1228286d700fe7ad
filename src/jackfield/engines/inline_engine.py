"""What engines have in common that run their batches through `inline`: everything but the model.

An engine of this kind brings facts, modules and a forward pass; how prompts are batched, and which channel serves which
value, is here. Its layers are all alike, at `layers.N`, with grouped-query attention in the child `attention`.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jackfield.engines.choosing import RowChooser
from jackfield.engines.engine import Facts, LoadedEngine, Outcome, Request
from jackfield.engines.inline import Derivation, DerivedChannel, InlineChannel, InlineRun, InlineTap
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Limits, Sampling, admit
from jackfield.errors import InvalidRequest, TracingError, Unavailable, UnknownValue
from jackfield.interleave.channel import Channel
from jackfield.interleave.modes import modes_restored
from jackfield.interleave.worker import Worker
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, LayerAnatomy, Missing
from jackfield.values.layer import Layer, part_at, values
from jackfield.values.part import Part
from jackfield.values.tree import RAW_NAMES

NO_ROUTER: Final = "this layer has no router"
VALUES: Final = {value.name: value for value in values()}


class Projects(Protocol):
    """What is asked of a model beside its forward pass."""

    def project(self, x: Tensor, norm: bool) -> Tensor:
        """[..., d_model] on the vocabulary."""
        ...

    def head_results(self, layer: int, premix: Tensor) -> Tensor:
        """[1, token, head, d_value] to each head's part of the attention's output, [1, token, head, d_model]."""
        ...


M = TypeVar("M", bound=Projects)


class InlineEngine(LoadedEngine[M]):
    """An engine whose `model` hands its values to a tap. `max_batch_size` is how many samples run beside each other."""

    name: str  # in messages
    refused: Sequence[str] = ()  # sampling arguments that it cannot honour
    mlp = "mlp"  # what a layer calls its feed-forward block

    def __init__(
        self,
        model: M,
        facts: Facts,
        limits: Limits,
        *,
        tokenizer: Tokenizer | None,
        config: Any,  # transformers' configuration
        eos_ids: frozenset[int],
        max_batch_size: int,
    ) -> None:
        self._model = model
        self.facts, self.limits = facts, limits
        self.anatomy = Anatomy(tuple(map(self._layer, range(facts.num_layers))), {}, None, None)
        self.tokenizer, self.config = tokenizer, config
        self.max_batch_size = max_batch_size
        self._eos_ids = eos_ids
        layers = (None, *range(facts.num_layers))
        self._channels = {(name, layer): self._made(name, layer) for name in VALUES for layer in layers}
        self._run: InlineRun | None = None
        self._lock = threading.Lock()

    # -- what an engine brings

    @abstractmethod
    def forward(
        self, tokens: Int[Tensor, "batch token"], columns: int, pads: Sequence[int], tap: InlineTap
    ) -> Float[Tensor, "batch vocab"]:
        """The logits of the last of these tokens, in a batch that has `columns` behind it and `pads` before each."""

    def call(self, method: str, *args: Any) -> Any:
        """A method of the model, on every rank that shares it."""
        return getattr(self.model, method)(*args)

    def beside(self, run: InlineRun) -> AbstractContextManager[object]:
        """What is open while a batch runs."""
        return nullcontext()

    # -- running

    def admit(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        sampling.refuse(self.refused, self.name)
        admit(prompt_token_ids, sampling, self.limits)
        for name in ("stop", "bad_words"):
            if self.tokenizer is None and getattr(sampling, name):
                raise InvalidRequest(f"{name} needs a tokenizer, and the model came without one: give it a tokenizer=.")
        if sampling.n > self.max_batch_size:
            raise InvalidRequest(f"n={sampling.n} samples run in one batch, and max_batch_size={self.max_batch_size}.")

    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        """As many as there is room for. What uses raw places, or gradients, runs alone: it is cut out of no batch."""
        batch: list[Request] = []
        for request in requests:
            if batch and not self._fits([*batch, request]):
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch

    def _fits(self, batch: Sequence[Request]) -> bool:
        """Rows are padded to the longest, and go on until all have ended: together they may be too much."""
        longest = max(len(request.prompt_token_ids) for request in batch)
        most = max(request.sampling.max_tokens for request in batch)
        room = self.limits.context is None or longest + most <= self.limits.context
        return room and sum(each.sampling.n for each in batch) <= self.max_batch_size and not any(map(alone, batch))

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        if Worker.current() is not None:
            raise TracingError("A trace cannot run inside a block: the model is busy with this one.")
        gradients = any(request.gradients for request in requests)
        with self._lock, modes_restored(), torch.set_grad_enabled(gradients):
            run = self._run = InlineRun(self, requests, self._eos_ids)
            try:
                with self.beside(run):
                    return run.run(self.forward, RowChooser(run, self.tokenizer, self.facts.device))
            finally:
                self._run = None

    # -- serving

    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        return self.call("project", x, norm)

    def channel(self, name: str, layer: int | None, call: int | None) -> Channel:
        made = self._channels[name, layer]
        if isinstance(made, str):
            raise Unavailable(f"{name} is not available: {made}.")
        return made

    def step_value(self, name: str, worker: Worker) -> Tensor:
        assert self._run is not None
        return self._run.input_ids[worker.rows.index :][:1, -worker.rows.num_tokens(worker.step) :]

    def _layer(self, layer: int) -> LayerAnatomy:
        path, width = f"layers.{layer}", self.facts.head_dim
        heads = (self.facts.num_heads, self.facts.num_kv_heads, width, width, width**-0.5)
        attention = AttentionAnatomy(f"{path}.attention", False, *heads)
        return LayerAnatomy(path, {}, attention, attention.path, f"{path}.{self.mlp}")

    def attention(self, layer: int) -> AttentionAnatomy:
        attention = self.anatomy.layers[layer].attention
        assert not isinstance(attention, Missing)
        return attention

    def sinks(self, layer: int) -> Tensor | None:
        return None

    def alibi_slopes(self, layer: int) -> Tensor | None:
        return None

    def part(self, path: str) -> Part:
        self.module(path)
        return part_at(self, self.anatomy, path)

    def layer_part(self, layer: int) -> Part:
        return Layer(self, self.anatomy.layers[layer].path, layer)

    def sublayer_path(self, layer: int, which: str) -> str:
        found = self.anatomy.layers[layer]
        return str(found.attention_path if which == "attention" else found.mlp_path)

    def support(self, layer: int | None) -> Mapping[str, str | None]:
        if layer is not None and not 0 <= layer < self.facts.num_layers:
            raise UnknownValue(f"There is no layer {layer!r}: layers are 0 to {self.facts.num_layers - 1}.")
        wanted = (name for name, value in VALUES.items() if layer is None or value.on != "model")
        return {name: NO_ROUTER if name == "router_logits" else None for name in wanted}

    def _made(self, name: str, layer: int | None) -> Channel | str:
        value = VALUES[name]
        if name == "router_logits":
            return NO_ROUTER
        if name == "next_token_probabilities":
            return DerivedChannel(value, layer, lambda logits: torch.softmax(logits[:, 0].float(), -1))
        if name == "attention_head_results" and layer is not None:
            return DerivedChannel(value, layer, self._by_head(layer))
        return InlineChannel(value, layer)

    def _by_head(self, layer: int) -> Derivation:
        return lambda premix: self.call("head_results", layer, premix)


def counted(name: str, value: object, context: int | None = None) -> int:
    """An option that is how many there are of something; InvalidRequest for anything but a whole number from 1.

    `context` is how many positions the model was made for, where they bound it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest(f"{name}={value!r}: it has to be a whole number from 1.")
    if context and value > context:
        raise InvalidRequest(f"{name}={value}: the model was made for {context} positions, and has none beyond.")
    return value


def uses_raw_places(request: Request) -> bool:
    """Whether its block names an `.input`, `.inputs` or `.output`."""
    return request.block is not None and bool(request.block.names & RAW_NAMES)


def alone(request: Request) -> bool:
    """Whether a request runs in a batch of its own."""
    return request.gradients or uses_raw_places(request)
