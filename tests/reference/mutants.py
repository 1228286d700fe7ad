"""Wrong records: the mistakes that systems of this kind have made, each applied to a right one.

A parity test is worth what it can reject. `MUTANTS` names, for each mistake, the models it shows on and the values it
spoils there; every test that compares with the reference can be run against them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests import zoo
from tests.reference.attention import Facts
from tests.reference.families import blocks_of, child, family_of
from tests.reference.identities import repeated, softmax_of
from tests.reference.record import Step, record

Mutate = Callable[[PreTrainedModel, str, list[Step]], list[Step]]
"""(model, zoo name, right record) -> wrong record."""

FUSED = ("query_key_value", "qkv_proj", "Wqkv", "c_attn")


@dataclass(frozen=True, slots=True)
class Attention:
    """All it takes to attend again: queries [1, H, t, d], keys and values so far, what may be seen [1, H, t, k]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    positions: Tensor
    facts: Facts
    spread: Callable[[Tensor, int], Tensor] = repeated
    cap_after_mask: bool = False

    def attend(self) -> dict[str, Tensor]:
        """Scores, pattern and head outputs by name."""
        heads = self.queries.shape[1]
        scores = self.queries @ self.spread(self.keys, heads).transpose(-1, -2) * self.facts.scale
        if self.cap_after_mask:
            scores = self._capped(scores.masked_fill(~self.visible, -torch.inf))
        else:
            scores = self._capped(scores).masked_fill(~self.visible, -torch.inf)
        pattern = softmax_of(scores, self.facts.sinks)
        written = (pattern @ self.spread(self.values, heads)).transpose(1, 2)
        return {
            "attention_scores": scores,
            "attention_probabilities": pattern,
            "attention_head_outputs": written,
        }

    def _capped(self, scores: Tensor) -> Tensor:
        cap = self.facts.softcap
        return scores if cap is None else cap * (scores / cap).tanh()


def reattended(change: Callable[[Attention], Attention]) -> Mutate:
    """The mutant whose attention is done again, after `change`, in every layer."""

    def mutate(_model: PreTrainedModel, _name: str, steps: list[Step]) -> list[Step]:
        return [_with_layers(step, _reattend(steps, step, change)) for step in steps]

    return mutate


def _reattend(steps: list[Step], step: Step, change: Callable[[Attention], Attention]) -> tuple[dict[str, Tensor], ...]:
    layers = []
    for layer, (values, facts) in enumerate(zip(step.layers, step.facts, strict=True)):
        if facts is None:
            layers.append(values)
            continue
        attention = Attention(
            queries=values["attention_queries"],
            keys=_so_far(steps, step, layer, "attention_keys"),
            values=_so_far(steps, step, layer, "attention_values"),
            visible=~values["attention_scores"].isneginf(),
            positions=step.positions,
            facts=facts,
        )
        layers.append(values | change(attention).attend())
    return tuple(layers)


def _so_far(steps: list[Step], step: Step, layer: int, name: str) -> Tensor:
    return torch.cat([earlier.layers[layer][name] for earlier in steps[: step.index + 1]], dim=2)


def _with_layers(step: Step, layers: tuple[dict[str, Tensor], ...]) -> Step:
    return replace(step, layers=layers)


def unchanged(attention: Attention) -> Attention:
    """No mistake: what is left is the arithmetic of this file, which must agree with the record."""
    return attention


def tiled_heads(attention: Attention) -> Attention:
    """Key/value heads tiled over the query heads (0 1 0 1) instead of repeated (0 0 1 1)."""
    return replace(attention, spread=lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1))


def window_off_by(extra: int) -> Callable[[Attention], Attention]:
    """Sliding windows that let a query see `extra` keys more."""

    def change(attention: Attention) -> Attention:
        seen = attention.visible[0, 0, -1].sum()
        if seen == attention.visible.shape[-1]:
            return attention
        distance = attention.positions[:, None] - torch.arange(attention.keys.shape[2])
        visible = (distance >= 0) & (distance < seen + extra)
        return replace(attention, visible=visible.expand_as(attention.visible))

    return change


def scale_by_width(attention: Attention) -> Attention:
    """1 / sqrt(head width), whatever the model says."""
    return replace(attention, facts=replace(attention.facts, scale=attention.queries.shape[-1] ** -0.5))


def cap_after_mask(attention: Attention) -> Attention:
    """The soft cap applied to masked scores: -inf becomes -cap, and the future is seen."""
    return replace(attention, cap_after_mask=True)


def no_sink(attention: Attention) -> Attention:
    """A plain softmax where there is a sink."""
    return replace(attention, facts=replace(attention.facts, sinks=None))


def no_mask(attention: Attention) -> Attention:
    """Everything is seen, as when an attention function is registered without a mask function."""
    return replace(attention, visible=torch.ones_like(attention.visible))


def per_layer(change: Callable[[Step, int, dict[str, Tensor]], dict[str, Tensor]]) -> Mutate:
    """The mutant that replaces some values of each layer: `change(step, layer, values)` gives those."""

    def mutate(_model: PreTrainedModel, _name: str, steps: list[Step]) -> list[Step]:
        return [
            _with_layers(step, tuple(values | change(step, layer, values) for layer, values in enumerate(step.layers)))
            for step in steps
        ]

    return mutate


def normed_output(step: Step, layer: int, _values: dict[str, Tensor]) -> dict[str, Tensor]:
    """`hidden_states[-1]`, which is after the final norm, taken for the last layer's output."""
    return {"layer_output": step.root["final_norm_output"]} if layer == len(step.layers) - 1 else {}


def half_stream(_step: Step, _layer: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One half of a stream that is handed on in two: the last sublayer's part alone."""
    return {"layer_output": values["mlp_output"]}


def before_post_norm(_step: Step, _layer: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the attention module returns, where a norm stands between it and the stream."""
    return {"attention_output": values["attention_head_results"].sum(2)}


def with_residual(_step: Step, _layer: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the modules return where they add the residual themselves."""
    return {
        "attention_output": values["attention_output"] + values["layer_input"],
        "mlp_output": values["layer_output"],
    }


def rolled_rows(_step: Step, _layer: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each token is given the row of the token before it."""
    return {"layer_output": values["layer_output"].roll(1, dims=1)}


def unscaled_residual(model: PreTrainedModel, name: str, steps: list[Step]) -> list[Step]:
    """What the sublayers return, without the multiplier of the add."""
    factor = family_of(model, name).residual_factor
    names = ("attention_output", "mlp_output")
    return per_layer(lambda _step, _layer, values: {x: values[x] / factor for x in names})(model, name, steps)


@torch.no_grad()
def flat_qkv(model: PreTrainedModel, name: str, steps: list[Step]) -> list[Step]:
    """A fused projection cut into all queries, all keys, all values, where its heads are interleaved."""
    family = family_of(model, name)
    attentions = [child(block, family.attention) for block in blocks_of(model, family)]

    def change(_step: Step, layer: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
        attention = attentions[layer]
        fused = next(getattr(attention, x) for x in FUSED if hasattr(attention, x))(values["attention_norm_output"])
        heads, width = values["attention_queries"].shape[1::2]
        kv_heads = (fused.shape[-1] // width - heads) // 2
        parts = fused.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        queries, keys, own = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in parts)
        spread = values["attention_values"].shape[1]
        return {
            "attention_queries_prerotary": queries,
            "attention_keys_prerotary": repeated(keys, spread),
            "attention_values": repeated(own, spread),
        }

    return per_layer(change)(model, name, steps)


def shifted_positions(model: PreTrainedModel, name: str, steps: list[Step]) -> list[Step]:
    """Left padding without position ids: learned positions begin after the padding."""
    return record(model, name, steps[0].input_ids, len(steps), first_position=5)


def other_request(model: PreTrainedModel, name: str, steps: list[Step]) -> list[Step]:
    """The rows of another request of the same length."""
    prompt = zoo.prompt(name, steps[0].input_ids.shape[1], seed=99)
    return record(model, name, prompt, len(steps))


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake, the zoo models it shows on, and the values it spoils on each of them."""

    mutate: Mutate
    models: tuple[str, ...]
    spoils: tuple[str, ...]


_ATTENTION = ("attention_scores", "attention_probabilities", "attention_head_outputs")
_GROUPED = ("llama", "llama/8h", "llama/hd", "mistral", "gemma2", "qwen3", "phi3")
_WINDOWED = ("mistral", "qwen2", "gemma2", "gemma3_text", "cohere2", "phi3", "gpt_oss", "olmo3", "starcoder2")
_SCALED = ("gemma2", "gemma3_text", "granite", "gpt2/inv", "gpt2/noscale", "gpt_bigcode/noscale", "opt")
_ANY = ("llama", "gpt2", "bloom", "gemma2")

MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "tiled heads": Mutant(reattended(tiled_heads), _GROUPED, _ATTENTION),
        "window of W - 1": Mutant(reattended(window_off_by(-1)), _WINDOWED, _ATTENTION),
        "window of W + 1": Mutant(reattended(window_off_by(1)), _WINDOWED, _ATTENTION),
        "scale of 1 / sqrt(d)": Mutant(reattended(scale_by_width), _SCALED, _ATTENTION),
        "cap after the mask": Mutant(reattended(cap_after_mask), ("gemma2", "vaultgemma"), _ATTENTION),
        "no sink": Mutant(reattended(no_sink), ("gpt_oss", "mimo_v2_flash", "granite_swa"), _ATTENTION[1:]),
        "no mask": Mutant(reattended(no_mask), ("llama", "gpt2", "gemma2", "gpt_oss"), _ATTENTION),
        "output after the final norm": Mutant(per_layer(normed_output), _ANY, ("layer_output",)),
        "half of the stream": Mutant(per_layer(half_stream), _ANY, ("layer_output",)),
        "row of the token before": Mutant(per_layer(rolled_rows), _ANY, ("layer_output",)),
        "part before its norm": Mutant(
            per_layer(before_post_norm), ("gemma2", "gemma3_text", "olmo2", "exaone4", "glm4"), ("attention_output",)
        ),
        "part with its residual": Mutant(
            per_layer(with_residual), ("bloom", "mpt"), ("attention_output", "mlp_output")
        ),
        "part without its multiplier": Mutant(unscaled_residual, ("granite",), ("attention_output", "mlp_output")),
        "queries, keys, values in a row": Mutant(
            flat_qkv,
            ("gpt_neox", "bloom", "falcon/40b", "falcon/rw"),
            ("attention_queries_prerotary", "attention_keys_prerotary", "attention_values"),
        ),
        "positions after the padding": Mutant(
            shifted_positions, ("gpt2", "gpt_neo", "opt"), ("layer_output", "logits")
        ),
        "another request": Mutant(other_request, _ANY, ("layer_output", "logits", "attention_head_outputs")),
    }
)
