"""What two readings of one model agree on. The rest is missing, with the reason."""

import math
from collections.abc import Mapping
from dataclasses import replace

from jackfield.values.anatomy import (
    Anatomy,
    AttentionAnatomy,
    Formula,
    Heads,
    LayerAnatomy,
    Missing,
    Projection,
)

_Value = Formula | Missing


def agree(first: Anatomy, second: Anatomy) -> Anatomy:
    """What both readings say."""
    pairs = zip(first.layers, second.layers, strict=True)
    return replace(
        first,
        layers=tuple(_layer(one, other) for one, other in pairs),
        values=_values(first.values, second.values),
        final_norm=first.final_norm if first.final_norm == second.final_norm else None,
        broken={**second.broken, **first.broken},
    )


def _layer(first: LayerAnatomy, second: LayerAnatomy) -> LayerAnatomy:
    return replace(
        first,
        values=_values(first.values, second.values),
        attention=_attention(first.attention, second.attention),
        attention_path=first.attention_path if first.attention_path == second.attention_path else None,
        mlp_path=first.mlp_path if first.mlp_path == second.mlp_path else None,
    )


def _values(first: Mapping[str, _Value], second: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name: _formula(value, second.get(name, value)) for name, value in first.items()}


def _formula(first: _Value, second: _Value) -> _Value:
    if isinstance(first, Missing) or isinstance(second, Missing):
        return first if isinstance(first, Missing) else second
    same = replace(first, factor=1.0) == replace(second, factor=1.0)
    if same and math.isclose(first.factor, second.factor, rel_tol=1e-3):
        return first
    return _differing(first.site, second.site)


def _attention(first: AttentionAnatomy | Missing, second: AttentionAnatomy | Missing) -> AttentionAnatomy | Missing:
    if isinstance(first, Missing) or isinstance(second, Missing):
        return first if isinstance(first, Missing) else second
    queries = _heads(first.queries_prerotary, second.queries_prerotary)
    keys = _heads(first.keys_prerotary, second.keys_prerotary)
    one = replace(first, queries_prerotary=queries, keys_prerotary=keys)
    other = replace(second, queries_prerotary=queries, keys_prerotary=keys)
    return one if one == other else _differing(one, other)


def _heads(first: Heads, second: Heads) -> Heads:
    if isinstance(first, Missing) or isinstance(second, Missing):
        return first if isinstance(first, Missing) else second
    if isinstance(first, Projection) and isinstance(second, Projection):
        same = replace(first, factor=1.0) == replace(second, factor=1.0)
        return first if same and math.isclose(first.factor, second.factor, rel_tol=1e-3) else _differing(first, second)
    return first if first == second else _differing(first, second)


def _differing(first: object, second: object) -> Missing:
    return Missing(f"two prompts showed it at different places: {first} and {second}")
