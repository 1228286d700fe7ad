"""A scripted engine, which drives blocks as the real engines do: what the contract suite holds the others against.

It is a model of nothing. It takes the likeliest token and refuses every other sampling.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from jackfield.engines.engine import Engine, Facts, Outcome, Request
from jackfield.engines.fake_decoder import (
    CONTEXT,
    D_MLP,
    D_MODEL,
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    Decoder,
    ForwardPass,
    by_head,
)
from jackfield.engines.fake_decoder import norm as normed
from jackfield.engines.inline import DerivedChannel, InlineChannel, InlineRun
from jackfield.engines.progress import Progress
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Limits, Sampling, admit
from jackfield.errors import EngineDied, TracingError, Unavailable, UnknownValue
from jackfield.interleave.worker import Channel, Worker
from jackfield.values.anatomy import AttentionAnatomy
from jackfield.values.layer import Layer, values
from jackfield.values.part import Part

VALUES = {value.name: value for value in values()}
REFUSED = (
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "bad_words", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs"),
)
NO_ROUTER = "this layer has no router"
NO_MODULES = "the scripted engine has no modules at which raw tensors pass"


class FakeEngine(Engine):
    """The scripted engine. At most `max_num_seqs` requests run in a batch."""

    def __init__(self, seed: int = 0, *, tokenizer: Tokenizer | None = None, max_num_seqs: int = 8) -> None:
        self.tokenizer, self.config, self.max_num_seqs = tokenizer, None, max_num_seqs
        self.facts = Facts(LAYERS, HEADS, 1, WIDTH, D_MODEL, D_MLP, VOCAB, torch.float32, torch.device("cpu"))
        eos: int | None = getattr(tokenizer, "eos_token_id", None)
        self._eos_ids = frozenset(() if eos is None else (eos,))
        self._decoder: Decoder | None = Decoder(seed)
        self._channels = {(name, layer): self._made(name, layer) for name in VALUES for layer in (None, *range(LAYERS))}
        self._run: InlineRun | None = None
        self._lock = threading.Lock()

    @property
    def decoder(self) -> Decoder:
        """The weights; EngineDied after `close`."""
        if self._decoder is None:
            raise EngineDied("This model was closed.")
        return self._decoder

    def close(self) -> None:
        self._decoder = None

    def admit(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        sampling.refuse(REFUSED, "scripted")
        admit(prompt_token_ids, sampling, Limits(VOCAB, CONTEXT, "CONTEXT"))

    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        batch: list[Request] = []
        for request in requests:
            batch.append(request)
            if len(batch) == self.max_num_seqs:
                yield batch
                batch = []
        if batch:
            yield batch

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        if Worker.current() is not None:
            raise TracingError("A trace cannot run inside a block: the model is busy with this one.")
        with self._lock, torch.no_grad():
            self._run = InlineRun(self, requests, self._eos_ids)
            try:
                return self._run.run(ForwardPass(self.decoder), likeliest)
            finally:
                self._run = None

    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        return (normed(x) if norm else x) @ self.decoder.head.T

    def channel(self, name: str, layer: int | None, call: int | None, step: int) -> Channel:
        made = self._channels[name, layer]
        if isinstance(made, str):
            raise Unavailable(f"{name} is not available: {made}.")
        return made

    def raw_channel(self, path: str, port: str) -> Channel:
        raise Unavailable(f"{path}.{port} is not available: {NO_MODULES}.")

    def step_value(self, name: str, worker: Worker) -> Tensor:
        assert self._run is not None
        return self._run.input_ids[worker.rows.index :][:1, -worker.rows.num_tokens(worker.step) :].clone()

    def heads(self, name: str, layer: int) -> int:
        return 1 if VALUES[name].axes.split()[1] == "Hkv" else HEADS

    def attention(self, layer: int) -> AttentionAnatomy:
        return AttentionAnatomy(f"layers.{layer}.attention", False, HEADS, 1, WIDTH, WIDTH, WIDTH**-0.5)

    def sinks(self, layer: int) -> Tensor | None:
        return None

    def alibi_slopes(self, layer: int) -> Tensor | None:
        return None

    def module(self, path: str) -> nn.Module:
        parts = path.split(".")
        if path and not (parts[0] == "layers" and parts[-1] in ("attention", "mlp", *map(str, range(LAYERS)))):
            raise UnknownValue(f"There is no module {path!r}: {NO_MODULES}.")
        return nn.Module()

    def part(self, path: str) -> Part:
        raise UnknownValue(f"There is no module {path!r}: {NO_MODULES}.")

    def layer_part(self, layer: int) -> Part:
        return Layer(self, f"layers.{layer}", layer)

    def sublayer_path(self, layer: int, which: str) -> str:
        return f"layers.{layer}.{which}"

    def support(self, layer: int | None) -> Mapping[str, str | None]:
        if layer is not None and not 0 <= layer < LAYERS:
            raise UnknownValue(f"There is no layer {layer!r}: layers are 0 to {LAYERS - 1}.")
        wanted = (name for name, value in VALUES.items() if layer is None or value.on != "model")
        return {name: NO_ROUTER if name == "router_logits" else None for name in wanted}

    def _made(self, name: str, layer: int | None) -> Channel | str:
        if name == "router_logits":
            return NO_ROUTER
        if name == "next_token_probabilities":
            return DerivedChannel(VALUES[name], layer, lambda logits: torch.softmax(logits[:, 0].float(), -1))
        if name == "attention_head_results" and layer is not None:
            output = self.decoder.layers[layer].o
            return DerivedChannel(VALUES[name], layer, lambda premix: by_head(premix, output))
        return InlineChannel(VALUES[name], layer)


def likeliest(logits: Tensor, progress: Sequence[Progress]) -> list[int]:
    """The likeliest token of every row."""
    return [int(token) for token in logits.argmax(-1)]
