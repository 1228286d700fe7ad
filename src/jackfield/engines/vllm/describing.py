"""From what the probe saw pass to a Description, and to the channels that serve each value."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jackfield.engines.engine import Facts
from jackfield.engines.transformers.channels import HeadOutputsChannel, ScoresChannel
from jackfield.engines.vllm.attention import CachedChannel, OpFacts, OperandChannel, op_facts
from jackfield.engines.vllm.description import Description, LayerDescription
from jackfield.engines.vllm.host import FINAL_NORM, LOGITS
from jackfield.engines.vllm.passing import (
    HeadResultsChannel,
    HeadsChannel,
    LogitsChannel,
    PrerotaryChannel,
    StreamChannel,
)
from jackfield.engines.vllm.reading import LayerReading, Seen, Stream, Tolerance, halves, read_layer
from jackfield.engines.vllm.structure import BlockStructure
from jackfield.engines.vllm.taps import named
from jackfield.errors import UnsupportedModel
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Channel
from jackfield.values.anatomy import AttentionAnatomy, Missing

if TYPE_CHECKING:
    from jackfield.engines.vllm.worker_engine import WorkerEngine

NO_ROTARY_MODULE = (
    "this model's rotary embedding is no module that the layer has for itself, so what comes before it does not pass"
)
Found = Channel | str


class Describer:
    """Reads one loaded model."""

    def __init__(self, engine: "WorkerEngine", seen: Sequence[Seen]) -> None:
        self.engine, self.seen = engine, seen
        self.modules = named(engine.loaded)
        config: Any = engine.runner.model_config
        self.dtype: torch.dtype = config.dtype
        near = Tolerance.of(self.dtype)
        summed = halves(engine.structure, seen, self._renorm, near)
        blocks = engine.structure.blocks
        heard = {each.site for each in seen}
        dead = [block.path for block in blocks if Site(block.path, Port.OUTPUT) not in heard]
        if dead:
            raise UnsupportedModel(f"The taps of {', '.join(dead)} were not heard in the probe.")
        self.readings = [read_layer(block, seen, near, summed=summed) for block in blocks]
        self.found: Mapping[tuple[str, int | None], Found] = {
            **{(name, None): channel for name, channel in self._root().items()},
            **{
                (name, number): channel
                for number, (block, reading) in enumerate(zip(blocks, self.readings, strict=True))
                for name, channel in self._layer(number, block, reading).items()
            },
        }

    def channels(self) -> Mapping[tuple[str, int | None], Channel]:
        """What serves each name that is served."""
        return {key: found for key, found in self.found.items() if isinstance(found, Channel)}

    def description(self) -> Description:
        """What a client is told."""
        layers = [self._described(number) for number in range(len(self.readings))]
        modules = {path: type(module).__name__ for path, module in self.modules.items()}
        limits = self.engine.vllm_config.scheduler_config
        return Description(
            self._facts(layers),
            tuple(layers),
            self._missing(None),
            modules,
            {
                "max_model_len": self.engine.runner.model_config.max_model_len,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_num_seqs": limits.max_num_seqs,
            },
        )

    def _missing(self, layer: int | None) -> dict[str, str]:
        return {name: found for (name, at), found in self.found.items() if at == layer and isinstance(found, str)}

    def _renorm(self, path: str, x: Tensor) -> Tensor:
        """A norm's own result for one tensor."""
        with torch.inference_mode():
            made = self.modules[path](x.to(self.engine.runner.device, self.dtype))
        return (made[0] if isinstance(made, tuple) else made).float()

    # -- channels

    def _root(self) -> dict[str, Found]:
        embedding = self.engine.structure.embedding
        return {
            "token_embeddings": "the embedding module was not found in this model"
            if embedding is None
            else StreamChannel("token_embeddings", Site(embedding, Port.OUTPUT)),
            "final_norm_output": StreamChannel("final_norm_output", FINAL_NORM),
            "logits": LogitsChannel("logits", LOGITS),
            "next_token_probabilities": LogitsChannel("next_token_probabilities", LOGITS, softmax=True),
        }

    def _layer(self, number: int, block: BlockStructure, reading: LayerReading) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for name, value in reading.values.items():
            title = f"layers.{number}.{name}"
            found[name] = (
                value.reason
                if isinstance(value, Missing)
                else StreamChannel(title, value.site, summed=value.summed, factor=value.factor)
            )
        return found | self._attention(f"layers.{number}", block, reading)

    def _attention(self, title: str, block: BlockStructure, reading: LayerReading) -> dict[str, Found]:
        if block.op is None or block.reason is not None:
            return dict.fromkeys(ATTENTION_VALUES, block.reason or "this layer has no attention")
        facts, op = op_facts(self.modules[block.op]), block.op
        return {
            **self._prerotary(title, block, facts),
            "attention_queries": OperandChannel(f"{title}.attention_queries", op, "q"),
            "attention_keys": OperandChannel(f"{title}.attention_keys", op, "k"),
            "attention_values": OperandChannel(f"{title}.attention_values", op, "v"),
            "attention_cached_keys": CachedChannel(f"{title}.attention_cached_keys", op, 0),
            "attention_cached_values": CachedChannel(f"{title}.attention_cached_values", op, 1),
            "attention_scores": ScoresChannel(f"{title}.attention_scores", op, None, pattern=False),
            "attention_probabilities": ScoresChannel(f"{title}.attention_probabilities", op, None, pattern=True),
            "attention_head_outputs": HeadOutputsChannel(f"{title}.attention_head_outputs", op, None),
            **self._premix(title, facts, reading.output_projection),
        }

    def _premix(self, title: str, facts: OpFacts, path: str | None) -> dict[str, Found]:
        if path is None:
            return dict.fromkeys(("attention_premix", "attention_head_results"), "no output projection was found")
        site, projection = Site(path, Port.INPUT), self.modules[path]
        return {
            "attention_premix": HeadsChannel(f"{title}.attention_premix", site, facts.num_heads),
            "attention_head_results": HeadResultsChannel(
                f"{title}.attention_head_results", site, facts.num_heads, projection
            ),
        }

    def _prerotary(self, title: str, block: BlockStructure, facts: OpFacts) -> dict[str, Found]:
        names = {
            "attention_queries_prerotary": ("query", facts.num_heads),
            "attention_keys_prerotary": ("key", facts.num_kv_heads),
        }
        heard = {each.site for each in self.seen}
        found: dict[str, Found] = {}
        for name, (key, heads) in names.items():
            site = Site(block.rotary or "", Port.INPUT, key)
            channel = PrerotaryChannel(f"{title}.{name}", site, heads)
            found[name] = channel if block.rotary is not None and site in heard else NO_ROTARY_MODULE
        return found

    # -- plain facts

    def _described(self, number: int) -> LayerDescription:
        block, reading = self.engine.structure.blocks[number], self.readings[number]
        if block.op is None or block.reason is not None:
            attention: AttentionAnatomy | Missing = Missing(block.reason or "this layer has no attention")
            facts = None
        else:
            facts = op_facts(self.modules[block.op])
            attention = AttentionAnatomy(
                block.op,
                dispatched=True,
                num_heads=facts.num_heads,
                num_kv_heads=facts.num_kv_heads,
                d_head=facts.d_head,
                d_value=facts.d_value,
                scale=facts.scale,
                window=facts.window,
                softcap=facts.softcap,
                output_projection=reading.output_projection,
            )
        return LayerDescription(
            block.path,
            reading.attention,
            reading.mlp,
            attention,
            None if facts is None or facts.slopes is None else facts.slopes.cpu(),
            None if facts is None or facts.sinks is None else facts.sinks.float().cpu(),
            self._missing(number),
        )

    def _facts(self, layers: Sequence[LayerDescription]) -> Facts:
        attention = next((each.attention for each in layers if isinstance(each.attention, AttentionAnatomy)), None)
        of = {each.site: each for each in self.seen}
        widths = [
            of[value.site].x.shape[-1]
            for each in self.readings
            if isinstance(value := each.values["mlp_activations"], Stream)
        ]
        return Facts(
            num_layers=len(layers),
            num_heads=attention.num_heads if attention else 0,
            num_kv_heads=attention.num_kv_heads if attention else 0,
            head_dim=attention.d_head if attention else 0,
            hidden_size=self.seen[0].x.shape[-1],
            intermediate_size=widths[0] if widths else 0,
            vocab_size=self.engine.runner.model_config.get_vocab_size(),
            dtype=self.dtype,
            device=torch.device(self.engine.runner.device),
        )


ATTENTION_VALUES = (
    "attention_queries_prerotary",
    "attention_keys_prerotary",
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_cached_keys",
    "attention_cached_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
    "attention_premix",
    "attention_head_results",
)
