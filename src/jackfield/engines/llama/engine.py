"""The native Llama as an engine: what it needs to load, to run a batch from its cache, and to say where values are."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jackfield.axes import TokenIds
from jackfield.engines.choosing import RowChooser
from jackfield.engines.engine import Facts
from jackfield.engines.inline import InlineRun, InlineTap
from jackfield.engines.inline_engine import InlineEngine, counted, uses_raw_places
from jackfield.engines.inline_raw import gated, raw_place
from jackfield.engines.llama.args import ModelArgs
from jackfield.engines.llama.checkpoint import load
from jackfield.engines.llama.layers import Transformer
from jackfield.engines.llama.parallel import ParallelLinear
from jackfield.engines.ranks import Ranks, refuse_others
from jackfield.engines.request import Limits
from jackfield.engines.snapshot import snapshot
from jackfield.engines.transformers.loading import parse_device, parse_dtype
from jackfield.errors import EngineDied, Unavailable, UnknownValue, near
from jackfield.interleave.worker import Channel
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, LayerAnatomy
from jackfield.values.layer import part_at
from jackfield.values.part import Part
from jackfield.values.tree import named_modules

OPTIONS: Final = ("tokenizer", "max_batch_size", "max_seq_len", "tensor_parallel_size")


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
        tensor_parallel_size: Any = 1,  # or the Ranks that torchrun has started
        **where: Any,  # `revision` and the like
    ) -> None:
        length = counted("max_seq_len", max_seq_len)
        found = snapshot(model, tokenizer, where, OPTIONS)
        size = counted("max_batch_size", max_batch_size)
        recipe = recipe_of(found.folder, dtype, size, min(length, found.context or length))
        self._ranks = _ranks(tensor_parallel_size, parse_device(device), recipe)
        try:
            self._model: Transformer | None = recipe(self._ranks.device if self._ranks else parse_device(device))
        except BaseException:
            self.close()
            raise
        if self._ranks is not None:
            self._join(self._ranks, self._model)
        args = self._model.args
        super().__init__(
            _facts(self._model),
            Anatomy(tuple(_layer(args, number) for number in range(args.n_layers)), {}, None, None),
            Limits(args.vocab_size, args.max_seq_len, "max_seq_len"),
            tokenizer=found.tokenizer,
            config=found.config,
            eos_ids=found.eos_ids,
            max_batch_size=size,
        )

    @property
    def model(self) -> Transformer:
        """The modules; EngineDied after `close`."""
        if self._model is None:
            raise EngineDied("This model was closed; load it again with jackfield.Model(...).")
        return self._model

    def close(self) -> None:
        ranks, self._ranks, self._model = self._ranks, None, None
        if ranks is not None:
            ranks.close()

    def forward(self) -> "ForwardPass":
        return ForwardPass(partial(self._call, "forward"))

    def _call(self, method: str, *args: Any) -> Any:
        """A method of the model, on all ranks."""
        return getattr(self.model, method)(*args) if self._ranks is None else self._ranks.call(method, *args)

    def _listen(self, tap: InlineTap | None) -> None:
        (self._ranks or self.model).listen(tap)

    def _join(self, ranks: Ranks, model: Transformer) -> None:
        """Leads the other ranks from now on, or follows until their leader ends, which raises Ended."""
        if ranks.rank > 0:
            ranks.follow(model)
        ranks.lead(model)
        self.no_gradients = "they do not cross ranks; load the model on one"
        for module in model.modules():
            if isinstance(module, ParallelLinear):
                module.register_forward_pre_hook(lambda module, args: ranks.check_call())

    def chooser(self, run: InlineRun) -> RowChooser:
        return RowChooser(run, self.tokenizer, self.facts.device)

    @contextmanager
    def beside(self, run: InlineRun) -> Generator[None]:
        raw = any(map(uses_raw_places, run.company.requests))
        try:
            with gated(self.model, run) if raw else nullcontext():
                self._listen(run.tap if run.company.workers else None)
                yield
        finally:
            self._listen(None)

    def head_results(self, layer: int, premix: Tensor) -> Tensor:
        return self._call("head_results", layer, premix)

    def project(self, x: Tensor, *, norm: bool) -> Tensor:
        return self._call("project", x, norm)

    def raw_channel(self, path: str, port: str) -> Channel:
        ops = [f"{layer.attention_path}.attn" for layer in self.anatomy.layers]
        if self._ranks is not None and path not in ops:
            raise Unavailable(f"{path}.{port} is not available: a module has a part of it on each of several ranks.")
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

    def __init__(self, model: Callable[..., Tensor]) -> None:
        self._model, self._start_pos = model, 0

    def __call__(self, tokens: TokenIds, pads: Sequence[int], tap: object = None) -> Float[Tensor, "batch vocab"]:
        padding = torch.tensor(pads, device=tokens.device) if any(pads) else None
        logits = self._model(tokens, self._start_pos, padding, True)
        self._start_pos += tokens.shape[1]
        return logits[:, -1]


def recipe_of(
    folder: Path, dtype: torch.dtype | str | None, max_batch_size: int, max_seq_len: int
) -> Callable[[torch.device], Transformer]:
    """What makes a rank's part of the model, on a device."""
    wanted = parse_dtype(dtype)
    sizes = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
    return partial(load, folder, wanted if isinstance(wanted, torch.dtype) else None, **sizes)


def _ranks(asked: Any, device: torch.device, recipe: Callable[[torch.device], Transformer]) -> Ranks | None:
    if isinstance(asked, Ranks):
        return asked
    size = counted("tensor_parallel_size", asked)
    refuse_others(size)
    return None if size == 1 else Ranks.started(size, device, recipe)


def _facts(model: Transformer) -> Facts:
    args, weight = model.args, model.tok_embeddings.weight
    heads = (args.n_heads, args.n_kv_heads or args.n_heads, args.d_head)
    return Facts(args.n_layers, *heads, args.dim, args.d_mlp, args.vocab_size, weight.dtype, weight.device)


def _layer(args: ModelArgs, number: int) -> LayerAnatomy:
    path, width = f"layers.{number}", args.d_head
    heads = (args.n_heads, args.n_kv_heads or args.n_heads, width, width, width**-0.5)
    attention = AttentionAnatomy(f"{path}.attention", False, *heads)
    return LayerAnatomy(path, {}, attention, attention.path, f"{path}.feed_forward")
