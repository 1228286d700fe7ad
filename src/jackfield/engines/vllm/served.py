"""What a client's engine and a worker's have in common: both answer for the parts of one described model."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from jackfield.engines.engine import Engine
from jackfield.engines.vllm.description import Description, LayerDescription, submodule
from jackfield.errors import Unavailable, UnknownValue
from jackfield.interleave.channel import Channel
from jackfield.interleave.modes import is_dual, is_of_transform
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, LayerAnatomy, Missing
from jackfield.values.attention import AttentionValues
from jackfield.values.layer import Layer, LayerValues, part_at
from jackfield.values.mlp import MlpValues
from jackfield.values.part import Part
from jackfield.values.root import RootValues
from jackfield.values.value import declared


def refuse_derivatives(x: Tensor) -> None:
    """Unavailable where something would be derived by what is to be projected on the vocabulary, or mapped over."""
    if is_of_transform(x) or is_dual(x) or (x.requires_grad and torch.is_grad_enabled()):
        raise Unavailable(
            "project_on_vocab is not available for derivatives, or inside torch.func, on this engine: vLLM's final "
            "norm and output head have none, and they would be zero. Detach what it is given, or use the "
            "transformers engine."
        )


class Served(Engine):
    """An engine over a described model."""

    description: Description
    tree: nn.Module
    channels: Mapping[tuple[str, int | None], Channel]

    def channel(self, name: str, layer: int | None, call: int | None) -> Channel:
        found = self.channels.get((name, layer))
        if found is None:
            title = name if layer is None else f"layers.{layer}.{name}"
            raise Unavailable(f"{title} is not available: {self._reason(name, layer)}")
        return found

    def _reason(self, name: str, layer: int | None) -> str | None:
        missing = self.description.missing if layer is None else self.description.layers[layer].missing
        return missing.get(name)

    def attention(self, layer: int) -> AttentionAnatomy:
        attention = self._layer(layer).attention
        if isinstance(attention, Missing):
            raise Unavailable(f"layers.{layer} has no attention values: {attention.reason}")
        return attention

    def sinks(self, layer: int) -> Tensor | None:
        return self._layer(layer).sinks

    def alibi_slopes(self, layer: int) -> Tensor | None:
        return self._layer(layer).slopes

    def module(self, path: str) -> nn.Module:
        return submodule(self.tree, path, self.description.modules)

    def part(self, path: str) -> Part:
        self.module(path)
        return part_at(self, self._anatomy, path)

    def layer_part(self, layer: int) -> Part:
        return self._layers[layer]

    @cached_property
    def _layers(self) -> list[Layer]:
        return [Layer(self, each.path, number) for number, each in enumerate(self.description.layers)]

    def sublayer_path(self, layer: int, which: str) -> str:
        found = self._layer(layer)
        return (found.attention_path if which == "attention" else found.mlp_path) or found.path

    def support(self, layer: int | None) -> Mapping[str, str | None]:
        layers = self.description.layers
        if layer is not None and not 0 <= layer < len(layers):
            raise UnknownValue(f"There is no layer {layer!r}: layers are 0 to {len(layers) - 1}.")
        names = [value.name for owner in (LayerValues, AttentionValues, MlpValues) for value in declared(owner)]
        if layer is not None:
            return {name: layers[layer].missing.get(name) for name in names}
        root = {value.name: self.description.missing.get(value.name) for value in declared(RootValues)}
        return root | {name: _over_layers(layers, name) for name in names}

    def _layer(self, layer: int) -> LayerDescription:
        return self.description.layers[layer]

    @property
    def _anatomy(self) -> Anatomy:
        blocks = [
            LayerAnatomy(each.path, {}, each.attention, each.attention_path, each.mlp_path)
            for each in self.description.layers
        ]
        return Anatomy(tuple(blocks), {}, None, None)


def _over_layers(layers: tuple[LayerDescription, ...], name: str) -> str | None:
    reasons: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        if name in layer.missing:
            reasons.setdefault(layer.missing[name], []).append(number)
    if len(reasons) == 1 and len(next(iter(reasons.values()))) == len(layers):
        return next(iter(reasons))
    told = (f"layers {', '.join(map(str, numbers))}: {reason}" for reason, numbers in reasons.items())
    return "; ".join(told) or None
