"""What every engine is to the one front over them: it takes requests with their blocks, and serves values to them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from jackfield.engines.prompt import Prompt, Tokenizer
from jackfield.engines.request import Completion, Sampling
from jackfield.errors import EngineDied, Unavailable
from jackfield.interleave.channel import Channel
from jackfield.interleave.worker import Worker
from jackfield.interventions.places import Place
from jackfield.trace.tracer import Tracer
from jackfield.values.anatomy import AttentionAnatomy
from jackfield.values.part import Part


@runtime_checkable  # beartype, in tests, asks isinstance
class Bindable(Protocol):
    """A block, as an engine needs it."""

    @property
    def names(self) -> frozenset[str]: ...
    def bind(self, t: Tracer, device: torch.device, model: Any = None) -> Callable[[], Any]: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, how to go on from it, and the block that runs beside it."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    block: Bindable | None
    model: Any = None  # the front, which blocks get as their `model`
    gradients: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of one request: one entry per sample."""

    completions: list[Completion] = field(default_factory=list[Completion])
    saved: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    returned: list[Any] = field(default_factory=list[Any])
    errors: list[Exception | None] = field(default_factory=list[Exception | None])


@dataclass(frozen=True, slots=True)
class Facts:
    """Plain facts of a loaded model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device


class Engine(ABC):
    """One loaded model that can be run. Also the Server that the model's parts ask."""

    facts: Facts
    tokenizer: Tokenizer | None
    config: Any  # transformers' configuration, whose attributes depend on the family
    no_gradients: str | None = 'this engine keeps no graph of what is read; engine="transformers" and "llama" do'
    """Why a trace cannot have gradients; None where it can."""

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, now."""
        return self.facts.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are, now."""
        return self.facts.device

    @property
    def vocab_size(self) -> int:
        """The vocabulary's size, now."""
        return self.facts.vocab_size

    @abstractmethod
    def admit(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        """Refuses, before anything runs, what cannot be run: InvalidRequest, RequestTooLong."""

    def admit_block(self, prompt_token_ids: Sequence[int]) -> None:
        """Refuses, before anything runs, a prompt that could run, but not with a block beside it."""
        del prompt_token_ids

    def outcomes(self, requests: Iterator[Request]) -> Iterator[Outcome]:
        """Runs a stream of requests: their outcomes, in order, as they end. A bounded number of requests is held."""
        for batch in self.batches(requests):
            yield from self.execute(batch)

    @abstractmethod
    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        """Runs these requests; an error in one block is its own Outcome's."""

    @abstractmethod
    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        """Cuts a stream of requests into the batches that `execute` takes."""

    def arm(self, places: Sequence[Place]) -> None:
        """Makes ready for blocks that will ask for all of these in one step; Unavailable with the reason."""
        for place in places:
            if (reason := self.support(place.layer).get(place.name)) is not None:
                raise Unavailable(f"{place} is not available: {reason}.")

    def stats(self) -> Mapping[str, int]:
        """How many passes ran in which way; empty where all run in the same."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Lets go of the model."""

    @abstractmethod
    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        """Final norm, output head, scale and cap: [..., d_model] to [..., vocab]."""

    @abstractmethod
    def channel(self, name: str, layer: int | None, call: int | None) -> Channel:
        """Where a value is; Unavailable with the reason where it is not."""

    @abstractmethod
    def raw_channel(self, path: str, port: str) -> Channel:
        """A module's `.input`, `.inputs` or `.output`."""

    @abstractmethod
    def step_value(self, name: str, worker: Worker) -> Any:
        """What is known as soon as a step has begun."""

    @abstractmethod
    def attention(self, layer: int) -> AttentionAnatomy:
        """The attention of a layer; Unavailable where it has none."""

    @abstractmethod
    def sinks(self, layer: int) -> Tensor | None:
        """The sinks' logits [head]."""

    @abstractmethod
    def alibi_slopes(self, layer: int) -> Tensor | None:
        """ALiBi's slopes [head]."""

    @abstractmethod
    def module(self, path: str) -> nn.Module:
        """The module at a path; UnknownValue."""

    @abstractmethod
    def part(self, path: str) -> Part:
        """The part at a module's path."""

    @abstractmethod
    def layer_part(self, layer: int) -> Part:
        """The part of a decoder block."""

    @abstractmethod
    def sublayer_path(self, layer: int, which: str) -> str:
        """The path of a layer's "attention" or "mlp"."""

    @abstractmethod
    def support(self, layer: int | None) -> Mapping[str, str | None]:
        """For each name, None or the reason it is not available."""


M = TypeVar("M")


class LoadedEngine(Engine, Generic[M]):
    """An engine whose model is an object in this process."""

    _model: M | None

    @property
    def model(self) -> M:
        """What runs; EngineDied after `close`."""
        if self._model is None:
            raise EngineDied("This model was closed; load it again with jackfield.Model(...).")
        return self._model

    def close(self) -> None:
        self._model = None
