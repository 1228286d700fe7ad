"""Which channel serves which name on a loaded model, and the reasons where none does."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from jackfield.engines.transformers.channels import (
    CachedChannel,
    FormulaChannel,
    HeadOutputsChannel,
    HeadResultsChannel,
    HeadsFormulaChannel,
    LogitsChannel,
    NextTokenProbabilitiesChannel,
    OperandChannel,
    PrerotaryChannel,
    ScoresChannel,
)
from jackfield.errors import Unavailable
from jackfield.interleave.channel import Channel
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, Formula, Missing
from jackfield.values.attention import AttentionValues
from jackfield.values.layer import LayerValues, values
from jackfield.values.mlp import MlpValues
from jackfield.values.root import RootValues
from jackfield.values.value import declared

OPERANDS = {"attention_queries": "q", "attention_keys": "k", "attention_values": "v"}
CACHED = {"attention_cached_keys": "k", "attention_cached_values": "v"}
SCORES = {"attention_scores": False, "attention_probabilities": True}


class Serving:
    """The channels of one model, made once each."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy) -> None:
        self.model, self.anatomy = model, anatomy
        self._made: dict[tuple[str, int | None, int | None], Channel | Missing] = {}
        self._refused: dict[tuple[str, int], str] = {}

    def refuse(self, name: str, layer: int, reason: str) -> None:
        """Takes a value of a layer off, for a reason found after loading."""
        self._refused[name, layer] = reason
        self._made = {key: made for key, made in self._made.items() if key[:2] != (name, layer)}

    def channel(self, name: str, layer: int | None, call: int | None) -> Channel:
        """The channel of a name; Unavailable with the reason."""
        key = (name, layer, call)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._root(name) if layer is None else self._layer(name, layer, call)
        if isinstance(made, Missing):
            raise Unavailable(f"{_title(name, layer)} is not available: {made.reason}")
        return made

    def attention(self, layer: int) -> AttentionAnatomy:
        """The attention of a layer; Unavailable where it has none."""
        attention = self.anatomy.layers[layer].attention
        if isinstance(attention, Missing):
            raise Unavailable(f"layers.{layer} has no attention values: {attention.reason}")
        return attention

    def support(self, layer: int | None) -> Mapping[str, str | None]:
        """For each name, None or the reason; without a layer, which layers a reason holds for."""
        if layer is not None:
            return {value.name: self._reason(value.name, layer) for value in values() if value.on != "model"}
        root = {value.name: self._reason(value.name, None) for value in declared(RootValues)}
        names = [value.name for owner in (LayerValues, AttentionValues, MlpValues) for value in declared(owner)]
        return {**root, **{name: self._over_layers(name) for name in names}, **self.anatomy.broken}

    def _over_layers(self, name: str) -> str | None:
        reasons: dict[str, list[int]] = {}
        for layer in range(len(self.anatomy.layers)):
            reason = self._reason(name, layer)
            if reason is not None:
                reasons.setdefault(reason, []).append(layer)
        if not reasons:
            return None
        if len(reasons) == 1 and len(next(iter(reasons.values()))) == len(self.anatomy.layers):
            return next(iter(reasons))
        return "; ".join(f"layers {', '.join(map(str, layers))}: {reason}" for reason, layers in reasons.items())

    def _reason(self, name: str, layer: int | None) -> str | None:
        if name == "input_ids":
            return None
        try:
            self.channel(name, layer, None)
        except Unavailable:
            made = self._made[name, layer, None]
            assert isinstance(made, Missing)
            return made.reason
        return None

    def _root(self, name: str) -> Channel | Missing:
        if name == "logits":
            return LogitsChannel()
        if name == "next_token_probabilities":
            return NextTokenProbabilitiesChannel()
        formula = self.anatomy.values.get(name, Missing("this model has no place where it passes"))
        return formula if isinstance(formula, Missing) else FormulaChannel(name, formula)

    def _layer(self, name: str, layer: int, call: int | None) -> Channel | Missing:
        if (name, layer) in self._refused:
            return Missing(self._refused[name, layer])
        anatomy = self.anatomy.layers[layer]
        if not name.startswith("attention_") or name in ("attention_norm_output", "attention_output"):
            formula = anatomy.values.get(name, Missing("this layer has no place where it passes"))
            return formula if isinstance(formula, Missing) else FormulaChannel(_title(name, layer), formula)
        if isinstance(anatomy.attention, Missing):
            return anatomy.attention
        return self._attention(name, _title(name, layer), anatomy.attention, call)

    def _attention(self, name: str, title: str, attention: AttentionAnatomy, call: int | None) -> Channel | Missing:
        if name in attention.missing:
            return Missing(attention.missing[name])
        if name in ("attention_premix", "attention_head_results"):
            return self._premix(name, title, attention)
        if name.endswith("_prerotary"):
            return _prerotary(name, title, attention, call or 0)
        if attention.calls > 1 and call is None:
            return Missing(
                f"this attention attends {attention.calls} times: take attention.calls[0] to [{attention.calls - 1}]"
            )
        at = call or 0
        if name in OPERANDS:
            return OperandChannel(title, attention.path, OPERANDS[name], at, attention.unheld.get(OPERANDS[name]))
        if name in CACHED:
            return CachedChannel(title, attention.path, CACHED[name], at, attention.unheld.get(CACHED[name]))
        if name in SCORES:
            return ScoresChannel(title, attention.path, at, pattern=SCORES[name])
        if name == "attention_head_outputs":
            return HeadOutputsChannel(title, attention.path, at)
        return Missing("nothing serves this name")

    def _premix(self, name: str, title: str, attention: AttentionAnatomy) -> Channel | Missing:
        if attention.output_projection is None:
            return Missing("no output projection was found in this attention")
        formula = Formula(Site(attention.output_projection, Port.INPUT))
        if name == "attention_premix":
            return HeadsFormulaChannel(title, formula, attention.num_heads)
        return HeadResultsChannel(title, formula, attention.num_heads)


def _prerotary(name: str, title: str, attention: AttentionAnatomy, call: int) -> Channel | Missing:
    queries = name == "attention_queries_prerotary"
    found = attention.queries_prerotary if queries else attention.keys_prerotary
    if isinstance(found, Missing):
        return found
    return PrerotaryChannel(title, attention.path, found if isinstance(found, tuple) else (found,), call)


def _title(name: str, layer: int | None) -> str:
    return name if layer is None else f"layers.{layer}.{name}"
