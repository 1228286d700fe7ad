"""The native Llama as an engine: what it needs to load, to run a batch from its cache, and to say where values are."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jackfield.axes import TokenIds
from jackfield.engines.choosing import RowChooser
from jackfield.engines.engine import Facts
from jackfield.engines.inline import InlineRun
from jackfield.engines.inline_engine import InlineEngine, counted, uses_raw_places
from jackfield.engines.inline_raw import gated, raw_place
from jackfield.engines.llama.args import ModelArgs
from jackfield.engines.llama.checkpoint import load
from jackfield.engines.llama.layers import Transformer
from jackfield.engines.request import Limits
from jackfield.engines.snapshot import snapshot
from jackfield.engines.transformers.loading import parse_device, parse_dtype
from jackfield.errors import EngineDied, UnknownValue, near
from jackfield.interleave.worker import Channel
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, LayerAnatomy
from jackfield.values.layer import part_at
from jackfield.values.part import Part
from jackfield.values.tree import named_modules

OPTIONS: Final = ("tokenizer", "max_batch_size", "max_seq_len")


class LlamaEngine(InlineEngine):
    """A Llama out of a folder, or by hub name. `max_seq_len` is what the cache holds of a request, prompt and new."""

    name = "llama"
    refused = ("prompt_logprobs", "spaces_between_special_tokens")
    no_gradients = None

    def __init__(
        self,
        model: Any,  # parsed here: a folder or a hub name
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        tokenizer: Any = None,  # one to use, its name, or False for none
        max_batch_size: Any = 8,
        max_seq_len: Any = 2048,
        **where: Any,  # `revision` and the like
    ) -> None:
        length = counted("max_seq_len", max_seq_len)
        found, wanted = snapshot(model, tokenizer, where, OPTIONS), parse_dtype(dtype)
        self._model: Transformer | None = load(
            found.folder,
            dtype=wanted if isinstance(wanted, torch.dtype) else None,
            device=parse_device(device),
            max_batch_size=counted("max_batch_size", max_batch_size),
            max_seq_len=min(length, found.context or length),
        )
        args = self._model.args
        super().__init__(
            _facts(self._model),
            Anatomy(tuple(_layer(args, number) for number in range(args.n_layers)), {}, None, None),
            Limits(args.vocab_size, args.max_seq_len, "max_seq_len"),
            tokenizer=found.tokenizer,
            config=found.config,
            eos_ids=found.eos_ids,
            max_batch_size=max_batch_size,
        )

    @property
    def model(self) -> Transformer:
        """The modules; EngineDied after `close`."""
        if self._model is None:
            raise EngineDied("This model was closed; load it again with jackfield.Model(...).")
        return self._model

    def close(self) -> None:
        self._model = None

    def forward(self) -> "ForwardPass":
        return ForwardPass(self.model)

    def chooser(self, run: InlineRun) -> RowChooser:
        return RowChooser(run, self.tokenizer, self.facts.device)

    @contextmanager
    def beside(self, run: InlineRun) -> Generator[None]:
        raw = any(map(uses_raw_places, run.company.requests))
        try:
            with gated(self.model, run) if raw else nullcontext():
                self.model.listen(run.tap if run.company.workers else None)
                yield
        finally:
            self.model.listen(None)

    def head_results(self, layer: int, premix: Tensor) -> Tensor:
        return self.model.head_results(layer, premix)

    def project(self, x: Tensor, *, norm: bool) -> Tensor:
        return self.model.project(x, norm=norm)

    def raw_channel(self, path: str, port: str) -> Channel:
        ops = [f"{layer.attention_path}.attn" for layer in self.anatomy.layers]
        return raw_place(path, port, ops.index(path) if path in ops else None)

    def module(self, path: str) -> nn.Module:
        try:
            return self.model.get_submodule(path)
        except AttributeError:
            known = named_modules(self.model)
            raise UnknownValue(f"There is no module {path!r} in this model.{near(path, known)}") from None

    def part(self, path: str) -> Part:
        self.module(path)
        return part_at(self, self.anatomy, path)


class ForwardPass:
    """The forward passes of one batch: each goes on where the cache ends."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._start_pos = model, 0

    def __call__(self, tokens: TokenIds, pads: Sequence[int], tap: object = None) -> Float[Tensor, "batch vocab"]:
        padding = torch.tensor(pads, device=tokens.device) if any(pads) else None
        logits = self._model(tokens, self._start_pos, padding=padding, last_row=True)
        self._start_pos += tokens.shape[1]
        return logits[:, -1]


def _facts(model: Transformer) -> Facts:
    args, weight = model.args, model.tok_embeddings.weight
    heads = (args.n_heads, args.n_kv_heads or args.n_heads, args.d_head)
    return Facts(args.n_layers, *heads, args.dim, args.d_mlp, args.vocab_size, weight.dtype, weight.device)


def _layer(args: ModelArgs, number: int) -> LayerAnatomy:
    path, width = f"layers.{number}", args.d_head
    heads = (args.n_heads, args.n_kv_heads or args.n_heads, width, width, width**-0.5)
    attention = AttentionAnatomy(f"{path}.attention", False, *heads)
    return LayerAnatomy(path, {}, attention, attention.path, f"{path}.feed_forward")
