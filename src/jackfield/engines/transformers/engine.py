"""transformers in this process: the default engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jackfield.engines.company import Company
from jackfield.engines.engine import Facts, LoadedEngine, Outcome, Request
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import FinishReason, Sampling, admit
from jackfield.engines.transformers.alibi import alibi_slopes
from jackfield.engines.transformers.anatomy import read_anatomy
from jackfield.engines.transformers.channels import OpInputsChannel, OpOutputChannel, RawChannel
from jackfield.engines.transformers.decode import Layout, Row, decode
from jackfield.engines.transformers.dispatch import SWITCHBOARD
from jackfield.engines.transformers.gates import Gates
from jackfield.engines.transformers.graph import beginning, graph_kept
from jackfield.engines.transformers.lens import Lens
from jackfield.engines.transformers.loading import limits, load
from jackfield.engines.transformers.prefill import PromptCaches
from jackfield.engines.transformers.run import Run
from jackfield.engines.transformers.serving import Serving
from jackfield.engines.transformers.soft_caps import keep_caps, leaves_out_caps
from jackfield.engines.transformers.witness import refuse_unwitnessed
from jackfield.errors import InvalidRequest, TracingError, UnknownValue
from jackfield.interleave.channel import Channel
from jackfield.interleave.modes import modes_restored
from jackfield.interleave.worker import Worker
from jackfield.values.anatomy import AttentionAnatomy, Missing
from jackfield.values.families.family import Family
from jackfield.values.interface import AttentionFuser
from jackfield.values.layer import Layer, part_at
from jackfield.values.part import Part
from jackfield.values.tree import RAW_NAMES, submodule

NOWHERE_TO_BEGIN = "its graph begins at the token embeddings, and this model names no module that makes them"


class TransformersEngine(LoadedEngine[PreTrainedModel]):
    """A transformers model, run by its own `generate`."""

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        family: Family | None = None,
        max_num_seqs: Any = 8,  # parsed here
        **options: Any,
    ) -> None:
        if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or max_num_seqs < 1:
            raise InvalidRequest(
                f"max_num_seqs={max_num_seqs!r}: it is how many prompts run in one batch, an int from 1."
            )
        loaded, tokenizer = load(model, dtype=dtype, device=device, **options)
        self.tokenizer = cast("Tokenizer | None", tokenizer)  # transformers' signatures are looser
        self.max_num_seqs = max_num_seqs
        self.config = loaded.config
        self._limits = limits(loaded.config)
        self.anatomy = read_anatomy(loaded, family)
        keep_caps(loaded, self.anatomy, chosen=loaded is model or "attn_implementation" in options)
        self.serving = Serving(loaded, self.anatomy)
        refuse_unwitnessed(loaded, self.anatomy, self.serving)
        self.facts = _facts(loaded, self.anatomy.layers)
        self._model = loaded
        self.no_gradients = NOWHERE_TO_BEGIN if beginning(self.anatomy) is None else None
        self.gates = Gates(loaded, self.anatomy)
        self.caches = PromptCaches()
        self._lens = Lens(loaded, self.anatomy)
        self._parts: dict[str, Part] = {}
        self._layers = [Layer(self, layer.path, index) for index, layer in enumerate(self.anatomy.layers)]
        self._raw: dict[tuple[str, str], Channel] = {}
        self.running: Run | None = None

    # -- facts that a model's owner may change

    @property
    def dtype(self) -> torch.dtype:
        return self.facts.dtype if self._model is None else self._model.dtype

    @property
    def device(self) -> torch.device:
        return self.facts.device if self._model is None else self._model.device

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size if self._model is None else self._model.config.get_text_config().vocab_size

    # -- running

    def admit(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        admit(prompt_token_ids, sampling, self._limits)

    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        """At most max_num_seqs at a time. What uses raw places, or gradients, runs alone: it is cut out of no batch."""
        batch: list[Request] = []
        for request in requests:
            alone = request.gradients or (request.block is not None and bool(request.block.names & RAW_NAMES))
            if batch and (alone or len(batch) == self.max_num_seqs):
                yield batch
                batch = []
            batch.append(request)
            if alone:
                yield batch
                batch = []
        if batch:
            yield batch

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        if Worker.current() is not None:
            raise TracingError("A trace cannot run inside a block: the model is busy with this one.")
        with SWITCHBOARD.turn(self.model), modes_restored():
            return _Execution(self, requests).run()

    # -- serving

    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        assert self.model is not None  # EngineDied after `close`
        return self._lens.project(x, norm=norm)

    def channel(self, name: str, layer: int | None, call: int | None) -> Channel:
        return self.serving.channel(name, layer, call)

    def raw_channel(self, path: str, port: str) -> Channel:
        key = (path, port)
        if key not in self._raw:
            self._raw[key] = self._op_channel(path, port) or RawChannel(path, port)
        return self._raw[key]

    def _op_channel(self, path: str, port: str) -> Channel | None:
        """The virtual child `attn` of an attention module."""
        for layer in self.anatomy.layers:
            attention = layer.attention
            if isinstance(attention, AttentionAnatomy) and path == f"{attention.path}.attn":
                return (OpOutputChannel if port == "output" else OpInputsChannel)(attention.path, 0, path)
        return None

    def step_value(self, name: str, worker: Worker) -> Tensor:
        assert self.running is not None
        assert self.running.input_ids is not None
        rows = worker.rows
        return self.running.input_ids[rows.index : rows.index + 1, rows.tokens(worker.step)]

    def attention(self, layer: int) -> AttentionAnatomy:
        found = self.serving.attention(layer)
        uncapped = found.softcap is not None and self._model is not None and leaves_out_caps(self._model)
        return replace(found, softcap=None) if uncapped else found

    def sinks(self, layer: int) -> Tensor | None:
        module = self.module(self.attention(layer).path)
        fuser = AttentionFuser.match(None, module)
        found = None if fuser is None else fuser.sinks(module)
        return None if found is None else found.detach().clone()

    def alibi_slopes(self, layer: int) -> Tensor | None:
        return alibi_slopes(self.model, self.module(self.attention(layer).path), self.attention(layer).num_heads)

    def module(self, path: str) -> nn.Module:
        return submodule(self.model, path)

    def part(self, path: str) -> Part:
        if path not in self._parts:
            self.module(path)
            self._parts[path] = part_at(self, self.anatomy, path)
        return self._parts[path]

    def layer_part(self, layer: int) -> Part:
        return self._layers[layer]

    def sublayer_path(self, layer: int, which: str) -> str:
        anatomy = self.anatomy.layers[layer]
        return (anatomy.attention_path if which == "attention" else anatomy.mlp_path) or anatomy.path

    def support(self, layer: int | None) -> Mapping[str, str | None]:
        if layer is not None and not 0 <= layer < len(self.anatomy.layers):
            raise UnknownValue(f"There is no layer {layer!r}: layers are 0 to {len(self.anatomy.layers) - 1}.")
        return self.serving.support(layer)


class _Execution:
    """One call of `execute`: its rows, and the run that decoding has begun. decode's Control."""

    def __init__(self, engine: TransformersEngine, requests: Sequence[Request]) -> None:
        self.engine, self.company = engine, Company(engine, requests)
        samples = self.company.samples
        self.rows = [Row(self.company.token_ids(i), sample.sampling) for i, sample in enumerate(samples)]
        self.gradients = any(request.gradients for request in requests)
        self.run_: Run | None = None

    def run(self) -> list[Outcome]:
        engine = self.engine
        control = self if any(request.block is not None for request in self.company.requests) else None
        try:
            try:
                with graph_kept(engine.model) if self.gradients else nullcontext():
                    completions = decode(
                        engine.model,
                        engine.tokenizer,
                        self.rows,
                        control,
                        gradients=self.gradients,
                        caches=engine.caches,
                    )
            finally:
                self._close()  # before results are made of it: it ends what a block left running
            return self.company.outcomes(completions)
        finally:
            self._close()  # again, in case that Ctrl-C ended the first

    # -- decode's Control

    def begin(self, layout: Layout) -> None:
        """A group of rows is about to run together."""
        self._close()
        workers = self.company.workers_of(layout.rows, layout.pads)
        width = len(self.rows[layout.rows[0]].prompt_token_ids) + layout.pads[0]
        engine = self.engine
        names, one_step = self.company.names, all(self.rows[row].sampling.max_tokens == 1 for row in layout.rows)
        run = Run(engine.gates, workers, width, names, gradients=self.gradients, one_step=one_step)
        self.run_ = engine.running = run
        self.run_.start()

    def finished(self, row: int) -> FinishReason | None:
        """A reason to end a row after this step."""
        return self.company.verdict(row)

    def ended(self, row: int) -> None:
        """A row has its last token: its block sees no more steps."""
        worker = self.company.workers.get(row)
        if worker is not None and self.run_ is not None:
            self.run_.interleaver.finish(worker)

    def should_abort(self) -> bool:
        """Whether every row is to end."""
        return False

    def _close(self) -> None:
        if self.run_ is not None:
            self.run_.close()
            self.run_ = self.engine.running = None


def _facts(model: PreTrainedModel, layers: Sequence[Any]) -> Facts:
    config = model.config.get_text_config()
    attention = next((layer.attention for layer in layers if not isinstance(layer.attention, Missing)), None)
    intermediate = next(
        (
            getattr(config, name)
            for name in ("intermediate_size", "ffn_dim", "n_inner")
            if isinstance(getattr(config, name, None), int)
        ),
        0,
    )
    return Facts(
        num_layers=len(layers),
        num_heads=attention.num_heads if attention is not None else 0,
        num_kv_heads=attention.num_kv_heads if attention is not None else 0,
        head_dim=attention.d_head if attention is not None else 0,
        hidden_size=_hidden_size(model),
        intermediate_size=intermediate,
        vocab_size=config.vocab_size,
        dtype=model.dtype,
        device=model.device,
    )


def _hidden_size(model: PreTrainedModel) -> int:
    """The width of the stream: the configuration's, or where that has another name for it, the output head's."""
    stated = getattr(model.config.get_text_config(), "hidden_size", None)
    head = cast("nn.Module", model.get_output_embeddings())
    return stated if isinstance(stated, int) else next(head.parameters()).shape[-1]
