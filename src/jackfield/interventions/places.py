"""Where an intervention applies: the name of a value, with layers where it is one of a layer's.

`"layers.18.layer_output"` is one place, `"layers.4-8.mlp_output"` is five (both ends count), `"layers.*.layer_output"`
one per layer, and `"logits"` is the model's own.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, TypeAlias, cast

from jackfield.interventions.positions import whole
from jackfield.values.layer import values
from jackfield.values.synonyms import suggestion
from jackfield.values.value import Value

Layers: TypeAlias = str | tuple[int, ...]
"""As they are kept: "*", or their numbers."""
GivenLayers: TypeAlias = str | int | Iterable[int]
"""As they may be written."""
FORMS: Final = '18, [4, 8], range(4, 9), "4-8" (both ends count) or "*"'
SITES: Final = '"layers.18.layer_output", "layers.4-8.layer_output" or "layers.*.layer_output"'
ORDER: Final = (
    *("input_ids", "token_embeddings"),
    *("layer_input", "attention_norm_output", "attention_queries_prerotary", "attention_keys_prerotary"),
    *("attention_queries", "attention_keys", "attention_values", "attention_cached_keys", "attention_cached_values"),
    *("attention_scores", "attention_probabilities", "attention_head_outputs", "attention_premix"),
    *("attention_head_results", "attention_output", "layer_mid", "mlp_norm_output", "router_logits"),
    *("mlp_activations", "mlp_output", "layer_output"),
    *("final_norm_output", "logits", "next_token_probabilities"),
)
"""The values in the order of the forward pass; a layer's come once per layer."""
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Place:
    """One value, of one layer or (None) of the model."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def value(self) -> Value:
        """What is known of the value."""
        return named_values()[self.name]

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts places in the order of the forward pass."""
        place = ORDER.index(self.name)
        if self.layer is not None:
            return self.layer, place
        return (-1 if place < ORDER.index("layer_input") else 2**31), place


@dataclass(frozen=True, slots=True)
class Site:
    """A site string, taken apart. `layers` is None for a value of the model."""

    name: str
    layers: Layers | None

    def places(self, num_layers: int) -> list[Place]:
        """The places, in a model of so many layers. ValueError where it has fewer."""
        if self.layers is None:
            return [Place(self.name)]
        return [Place(self.name, layer) for layer in numbered(self.layers, num_layers)]


@cache
def named_values() -> Mapping[str, Value]:
    """Every value of the contract, by its name."""
    return MappingProxyType({value.name: value for value in values()})


def read_site(given: object) -> str:
    """A site string that can be taken apart. ValueError, with the reason, for any other."""
    if not isinstance(given, str):
        raise ValueError(f"{given!r} is no site; write a string such as {SITES}.")
    parse_site(given)
    return given


def parse_site(site: str) -> Site:
    """Takes a site string apart. ValueError, with the reason, for one that names no value."""
    head, _, rest = site.partition(".")
    layers, _, name = rest.partition(".")
    if head != "layers" or not rest:
        layers, name = "", site
    value = named_values().get(name)
    if value is None:
        raise ValueError(f"there is no value {name!r} in {site!r}.{_suggestion(name)}")
    if value.on == "model" and layers:
        raise ValueError(f"{name} is a value of the model, and not of its layers; write {name!r}.")
    if value.on != "model" and not layers:
        raise ValueError(f'{name} is a value of each layer; say which, as in "layers.18.{name}" or "layers.*.{name}".')
    return Site(name, read_layers(layers) if layers else None)


def _suggestion(name: str) -> str:
    return suggestion(name, named_values()) or f" A site is such as {SITES}, or a value of the model: 'logits'."


def read_layers(given: object) -> Layers:
    """All layers as `*`, or their numbers. ValueError, with the reason, for what is neither."""
    if isinstance(given, str):
        return given if given == "*" else _spanned(given)
    listed = cast("Iterable[object]", given if isinstance(given, Iterable) else [given])
    wrong = _no_layers(cast("object", given))
    numbers = tuple(whole(each, wrong) for each in listed)
    if not numbers or len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise ValueError(wrong)
    return numbers


def _spanned(text: str) -> tuple[int, ...]:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError(_no_layers(text))
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first or last > 2**16:  # far more than any model has, and a tuple that memory can hold
        raise ValueError(_no_layers(text))
    return tuple(range(first, last + 1))


def _no_layers(given: object) -> str:
    return f"{given!r} says no layers; write {FORMS}, each layer once, counted from 0."


def numbered(layers: Layers, num_layers: int) -> tuple[int, ...]:
    """The layers' numbers, ascending. ValueError for one that the model has not."""
    if isinstance(layers, str):
        return tuple(range(num_layers))
    for layer in layers:
        if layer >= num_layers:
            raise ValueError(f"there is no layer {layer}: the model has layers 0 to {num_layers - 1}.")
    return tuple(sorted(layers))
