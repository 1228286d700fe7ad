"""From what the probe saw pass to a Description, and to the channels that serve each value."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from jackfield.engines.engine import Facts
from jackfield.engines.vllm.attention import (
    CachedChannel,
    HeadOutputsChannel,
    OperandChannel,
    OpFacts,
    PrerotaryChannel,
    ScoresChannel,
    op_facts,
)
from jackfield.engines.vllm.description import Description, LayerDescription
from jackfield.engines.vllm.embedding import has_scaled_embedding
from jackfield.engines.vllm.forward_pass import FINAL_NORM, LOGITS
from jackfield.engines.vllm.joining import DIFFERS, given_by, joined
from jackfield.engines.vllm.parts import WHOLE_PART, Joint
from jackfield.engines.vllm.passing import (
    HeadResultsChannel,
    HeadsChannel,
    LogitsChannel,
    StreamChannel,
)
from jackfield.engines.vllm.prerotary import find_heads, is_rotated
from jackfield.engines.vllm.reading import LayerReading, Stream, halves, read_layer
from jackfield.engines.vllm.seen import Seen, Tolerance
from jackfield.engines.vllm.structure import BlockStructure
from jackfield.engines.vllm.taps import named
from jackfield.engines.vllm.witness import disagreement
from jackfield.errors import UnsupportedModel
from jackfield.interleave.channel import Channel
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import AttentionAnatomy, Missing
from jackfield.values.attention import AttentionValues
from jackfield.values.value import declared

if TYPE_CHECKING:
    from jackfield.engines.vllm.worker_engine import WorkerEngine

NO_HEADS = "no module of this attention gives these before the rotary embedding"
UNHEARD = "it was not heard in the probe"
SCALED = "transformers scales this model's embeddings inside of their module, and how much is not seen in this one"
Found = Channel | str


class Describer:
    """Reads one loaded model."""

    def __init__(self, engine: "WorkerEngine", heard: Sequence[Seen]) -> None:
        self.engine = engine
        self.modules = named(engine.loaded)
        config: Any = engine.runner.model_config
        self.dtype: torch.dtype = config.dtype
        self.near = Tolerance.of(self.dtype)
        seen, self.joints = joined(engine.ranks, engine.structure, heard, self.near)
        self.seen = seen
        self.of = {each.site: each for each in seen}  # in the order of the pass
        summed = halves(engine.structure, seen, self._renorm, self.near)
        blocks = engine.structure.blocks
        dead = [block.path for block in blocks if Site(block.path, Port.OUTPUT) not in self.of]
        if dead:
            raise UnsupportedModel(f"The taps of {', '.join(dead)} were not heard in the probe.")
        self.readings = [read_layer(block, seen, self.near, summed=summed) for block in blocks]
        self.found: Mapping[tuple[str, int | None], Found] = {
            **{(name, None): channel for name, channel in self._root().items()},
            **{
                (name, number): channel
                for number, (block, reading) in enumerate(zip(blocks, self.readings, strict=True))
                for name, channel in self._layer(number, block, reading).items()
            },
        }

    def refuse_changed(self, compiled: Sequence[Seen], plain: Sequence[Seen]) -> None:
        """UnsupportedModel where compiled code, with the taps in it, computes something else than the model does."""
        last, first = ({each.site: each for each in seen}[FINAL_NORM].x for seen in (compiled, plain))
        if not Tolerance(5 * self.near.relative, 0.0).same(last, first):
            raise UnsupportedModel(
                "Compiled with its taps this model computes something else than uncompiled: load it with "
                "enforce_eager=True."
            )

    def channels(self) -> Mapping[tuple[str, int | None], Channel]:
        """What serves each name that is served."""
        return {key: found for key, found in self.found.items() if isinstance(found, Channel)}

    def early(self) -> frozenset[Site]:
        """What passes before the attention op and is asked for there."""
        return frozenset(found.projection.site for found in self.found.values() if isinstance(found, PrerotaryChannel))

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
            made: Any = self.modules[path](x.to(self.engine.runner.device, self.dtype))
        return cast("Tensor", made[0] if isinstance(made, tuple) else made).float()

    # -- channels

    def _root(self) -> dict[str, Found]:
        return {
            "token_embeddings": self._embedding(),
            "final_norm_output": self._stream("final_norm_output", self._final_norm()),
            "logits": LogitsChannel("logits", LOGITS),
            "next_token_probabilities": LogitsChannel("next_token_probabilities", LOGITS, softmax=True),
        }

    def _embedding(self) -> Found:
        site = Site(self.engine.structure.embedding or "", Port.OUTPUT)
        if site not in self.of:
            return "the embedding module was not found in this model"
        given, entering = self.of[site].x, self.seen_stream
        if not has_scaled_embedding(self.engine.runner.model_config.hf_config):
            return self._stream("token_embeddings", site)
        factor = float((given * entering).sum() / given.square().sum()) if given.shape == entering.shape else 0.0
        if not self.near.same(given * factor, entering):
            return SCALED
        return self._stream("token_embeddings", site, factor=factor)

    def _stream(self, title: str, site: Site, *, summed: bool = False, factor: float = 1.0) -> Found:
        if site not in self.joints:
            return DIFFERS if site in self.of else UNHEARD
        return StreamChannel(title, site, summed=summed, factor=factor, joint=self.joints[site])

    @property
    def seen_stream(self) -> Tensor:
        """What entered the first block in the probe."""
        return self.of[Site(self.engine.structure.blocks[0].path, Port.INPUT)].x

    def _final_norm(self) -> Site:
        """The norm after the blocks: a projection may come between it and what the model gives."""
        order = list(self.of)
        blocks = order.index(Site(self.engine.structure.blocks[-1].path, Port.OUTPUT))
        sites = (Site(path, Port.OUTPUT) for path in self.engine.structure.final_norms)
        after = [site for site in sites if site in self.of and order.index(site) > blocks]
        return after[-1] if after else FINAL_NORM

    def _layer(self, number: int, block: BlockStructure, reading: LayerReading) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for name, value in reading.values.items():
            title = f"layers.{number}.{name}"
            found[name] = (
                value.reason
                if isinstance(value, Missing)
                else self._stream(title, value.site, summed=value.summed, factor=value.factor)
            )
        return found | self._attention(f"layers.{number}", block, reading)

    def _attention(self, title: str, block: BlockStructure, reading: LayerReading) -> dict[str, Found]:
        if block.op is None or block.reason is not None:
            return dict.fromkeys(ATTENTION_VALUES, block.reason or "this layer has no attention")
        facts, op = self._whole_facts(block.op), block.op
        if any(site in self.of and site not in self.joints for site in _op_sites(op)):
            return dict.fromkeys(ATTENTION_VALUES, DIFFERS)
        q, k, v, written = self._op_joints(op)
        return {
            **self._prerotary(title, block, facts),
            "attention_queries": OperandChannel(f"{title}.attention_queries", op, "q", q),
            "attention_keys": OperandChannel(f"{title}.attention_keys", op, "k", k),
            "attention_values": OperandChannel(f"{title}.attention_values", op, "v", v),
            "attention_cached_keys": CachedChannel(f"{title}.attention_cached_keys", op, 0, k),
            "attention_cached_values": CachedChannel(f"{title}.attention_cached_values", op, 1, v),
            "attention_scores": ScoresChannel(f"{title}.attention_scores", op, q, pattern=False),
            "attention_probabilities": ScoresChannel(f"{title}.attention_probabilities", op, q, pattern=True),
            "attention_head_outputs": HeadOutputsChannel(f"{title}.attention_head_outputs", op, written),
            **self._premix(title, facts, reading.output_projection),
            **self._unwitnessed(op, facts),
            **self._unread(op),
        }

    def _op_joints(self, op: str) -> list[Joint]:
        """Of the queries, keys, values and head outputs of an attention op; one that was not heard is whole."""
        return [self.joints.get(site, WHOLE_PART) for site in _op_sites(op)]

    def _whole_facts(self, op: str) -> OpFacts:
        """What an attention op is set to, with the heads of all ranks."""
        own = op_facts(self.modules[op])
        q, k, *_ = self._op_joints(op)
        device = self.engine.runner.device
        slopes, sinks = (None if each is None else q.join(each.to(device), 0) for each in (own.slopes, own.sinks))
        heads, kv_heads = q.count(own.num_heads), k.count(own.num_kv_heads)
        return replace(own, slopes=slopes, sinks=sinks, num_heads=heads, num_kv_heads=kv_heads)

    def _unread(self, op: str) -> dict[str, Found]:
        """Layers that choose their keys: in chunks, beside static sinks, or across from an encoder."""
        kind = type(self.modules[op]).__name__
        reason = f"a layer of this kind, {kind}, chooses its keys in a way that is not read"
        names = ("attention_scores", "attention_probabilities", "attention_cached_keys", "attention_cached_values")
        return {} if kind == "Attention" else dict.fromkeys(names, reason)

    def _unwitnessed(self, op: str, facts: OpFacts) -> dict[str, Found]:
        """What the probe does not bear out, and why."""
        received = [self.of.get(Site(op, Port.ATTEND, which)) for which in "qkv"]
        written = self.of.get(Site(op, Port.HEADS))
        seen = [each.x for each in (*received, written) if each is not None]
        reason = disagreement(facts, seen, self.dtype) if len(seen) == 4 else "its attention was not heard in the probe"
        return {} if reason is None else dict.fromkeys(("attention_scores", "attention_probabilities"), reason)

    def _premix(self, title: str, facts: OpFacts, path: str | None) -> dict[str, Found]:
        if path is None:
            return dict.fromkeys(("attention_premix", "attention_head_results"), "no output projection was found")
        site, projection = Site(path, Port.INPUT), self.modules[path]
        if site not in self.joints:
            return dict.fromkeys(("attention_premix", "attention_head_results"), DIFFERS)
        premix, given = self.joints[site], given_by(self.engine.ranks, projection)
        return {
            "attention_premix": HeadsChannel(f"{title}.attention_premix", site, facts.num_heads, premix),
            "attention_head_results": HeadResultsChannel(
                f"{title}.attention_head_results", site, facts.num_heads, premix, projection, given
            ),
        }

    def _prerotary(self, title: str, block: BlockStructure, facts: OpFacts) -> dict[str, Found]:
        return {
            f"attention_{name}_prerotary": self._before_rotation(f"{title}.attention_{name}_prerotary", block, *of)
            for name, of in (
                ("queries", ("q", facts.num_heads)),
                ("keys", ("k", facts.num_kv_heads)),
            )
        }

    def _before_rotation(self, name: str, block: BlockStructure, which: str, count: int) -> Found:
        """What the op receives where nothing rotates it."""
        assert block.op is not None
        received = self.of.get(Site(block.op, Port.ATTEND, which))
        if received is None or received.site not in self.joints:
            return NO_HEADS
        unrotated = OperandChannel(name, block.op, which, self.joints[received.site], writable=False)
        places = [Site(path, Port.OUTPUT) for path in block.makers]
        heads = received.x.reshape(received.x.shape[0], count, -1)
        ahead = itertools.takewhile(lambda seen: seen.site != received.site, self.of.values())
        made = [seen for seen in ahead if seen.site in places and seen.site in self.joints]
        projection = find_heads(made, heads, self.dtype)
        if projection is None:
            return NO_HEADS
        is_plain = not is_rotated(projection, self.of[projection.site].x, heads, self.near)
        before = self.joints[projection.site]
        return unrotated if is_plain else PrerotaryChannel(name, block.op, projection, before)

    # -- plain facts

    def _described(self, number: int) -> LayerDescription:
        block, reading = self.engine.structure.blocks[number], self.readings[number]
        if block.op is None or block.reason is not None:
            attention: AttentionAnatomy | Missing = Missing(block.reason or "this layer has no attention")
            facts = None
        else:
            facts = self._whole_facts(block.op)
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
        widths = [
            self.of[value.site].x.shape[-1]
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


def _op_sites(op: str) -> tuple[Site, ...]:
    """Where an attention op receives queries, keys and values, and where it gives its head outputs."""
    return *(Site(op, Port.ATTEND, which) for which in "qkv"), Site(op, Port.HEADS)


ATTENTION_VALUES = tuple(value.name for value in declared(AttentionValues))
