"""The native Llama as an engine: what it needs to load, to run a batch from its cache, and to say where values are."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jackfield.axes import TokenIds
from jackfield.engines.engine import Facts
from jackfield.engines.inline import InlineRun, InlineTap
from jackfield.engines.inline_engine import InlineEngine, counted, uses_raw_places
from jackfield.engines.inline_raw import gated, raw_place
from jackfield.engines.llama.checkpoint import load
from jackfield.engines.llama.layers import Transformer
from jackfield.engines.llama.parallel import ColumnParallelLinear, RowParallelLinear
from jackfield.engines.ranks import Ranks, Recipe, refuse_others
from jackfield.engines.request import Limits
from jackfield.engines.snapshot import snapshot
from jackfield.engines.transformers.loading import parse_device, parse_dtype
from jackfield.errors import Unavailable
from jackfield.interleave.channel import Channel
from jackfield.values.tree import submodule


class LlamaEngine(InlineEngine[Transformer]):
    """A Llama out of a folder, or by hub name. `max_seq_len` is what the cache holds of a request, prompt and new."""

    name = "llama"
    refused = ("prompt_logprobs", "spaces_between_special_tokens")
    no_gradients = None
    mlp = "feed_forward"

    def __init__(
        self,
        model: Any,  # parsed here: a folder or a hub name
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        tokenizer: Any = None,  # one to use, its name, or False for none
        max_batch_size: Any = 8,
        max_seq_len: Any = None,  # else 2,048, or as many as the model was made for
        tensor_parallel_size: Any = 1,  # or the Ranks that torchrun has started
        **where: Any,  # `revision` and the like
    ) -> None:
        options = ("tokenizer", "max_batch_size", "max_seq_len", "tensor_parallel_size")
        found, size = snapshot(model, tokenizer, where, options), counted("max_batch_size", max_batch_size)
        length = min(2048, found.context or 2048) if max_seq_len is None else max_seq_len
        cache = {"max_batch_size": size, "max_seq_len": counted("max_seq_len", length, found.context)}
        recipe = partial(load, found.folder, parse_dtype(dtype), **cache)
        self._ranks = _ranks(tensor_parallel_size, parse_device(device), recipe)
        try:
            loaded = recipe(self._ranks.device if self._ranks else parse_device(device))
        except BaseException:
            self.close()
            raise
        if self._ranks is not None:
            self._join(self._ranks, loaded)
        args, weight = loaded.args, loaded.tok_embeddings.weight
        heads = (args.n_heads, args.n_kv_heads or args.n_heads, args.d_head)
        super().__init__(
            loaded,
            Facts(args.n_layers, *heads, args.dim, args.d_mlp, args.vocab_size, weight.dtype, weight.device),
            Limits(args.vocab_size, args.max_seq_len, "max_seq_len"),
            tokenizer=found.tokenizer,
            config=found.config,
            eos_ids=found.eos_ids,
            max_batch_size=size,
        )

    def close(self) -> None:
        super().close()
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def forward(self, tokens: TokenIds, columns: int, pads: Sequence[int], tap: InlineTap) -> Tensor:
        padding = torch.tensor(pads, device=tokens.device) if any(pads) else None
        return self.call("forward", tokens, columns, padding, True)[:, -1]

    def call(self, method: str, *args: Any) -> Any:
        return super().call(method, *args) if self._ranks is None else self._ranks.call(method, *args)

    def _join(self, ranks: Ranks, model: Transformer) -> None:
        """Leads the other ranks from now on, or follows until their leader ends, which raises Ended."""
        if ranks.rank > 0:
            ranks.follow(model)
        ranks.lead(model)
        self.no_gradients = "they do not cross ranks; load the model on one"
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.register_forward_pre_hook(lambda module, args: ranks.check_call())

    @contextmanager
    def beside(self, run: InlineRun) -> Generator[None]:
        announces = self._ranks or self.model
        try:
            with gated(self.model, run) if any(map(uses_raw_places, run.company.requests)) else nullcontext():
                announces.listen(run.tap if run.company.workers else None)
                yield
        finally:
            announces.listen(None)

    def raw_channel(self, path: str, port: str) -> Channel:
        ops = [f"{layer.attention_path}.attn" for layer in self.anatomy.layers]
        if self._ranks is not None and path not in ops:
            raise Unavailable(f"{path}.{port} is not available: a module has a part of it on each of several ranks.")
        return raw_place(path, port, ops.index(path) if path in ops else None)

    def module(self, path: str) -> nn.Module:
        return submodule(self.model, path)


def _ranks(asked: Any, device: torch.device, recipe: Recipe) -> Ranks | None:
    if isinstance(asked, Ranks):
        return asked
    size = counted("tensor_parallel_size", asked)
    refuse_others(size)
    return None if size == 1 else Ranks.started(size, device, recipe)
