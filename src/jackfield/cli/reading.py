"""What `jackfield look` takes out of one forward pass: the logit lens, the strongest edges, one layer's pattern."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from jackfield.model import Model

PATTERN = "attention_probabilities"


@dataclass(frozen=True, slots=True)
class Edge:
    """The part of its attention, `probability`, that a head's query gives to a key; both are positions."""

    layer: int
    head: int
    query: int
    key: int
    probability: float


@dataclass(frozen=True, slots=True)
class Top:
    """What a layer's stream would say at each position if the model ended there: token ids and their probabilities."""

    layer: int
    ids: list[int]
    probabilities: list[float]


@dataclass(frozen=True, slots=True)
class Reading:
    """One prompt, read. `pattern` [head query key] is that of `layer`; both are None where no layer serves patterns."""

    prompt_ids: list[int]
    next_id: int
    lens: list[Top]
    edges: list[Edge]
    layer: int | None
    pattern: Tensor | None


_Returned = tuple[list[Top], list[Edge], int | None, Tensor | None]


def read(model: Model, prompt: str, layer: int | None, num_edges: int) -> Reading:
    """Read `prompt`. The pattern is that of `layer`; without one, of the layer of the strongest edge.

    Raises:
        Unavailable: `layer` has no pattern; the message says why.
    """
    layers = layers_with_patterns(model) if layer is None else [layer]
    result: Any = model.run(prompt, _block(layers, num_edges))
    returned: _Returned = result.returned
    lens, edges, drawn, pattern = returned
    best = sorted(edges, key=lambda edge: -edge.probability)[:num_edges]
    return Reading(result.prompt_token_ids, result.token_ids[0], lens, best, drawn, pattern)


def _block(layers: Sequence[int], num_edges: int) -> Callable[[Any, Any], Any]:
    def block(model: Any, t: Any) -> _Returned:
        lens: list[Top] = []
        edges: list[Edge] = []
        drawn, pattern, weight = None, None, -1.0
        for number, layer in enumerate(model.layers):
            if number in layers:
                probabilities = layer.attention_probabilities[0]
                found = strongest(probabilities, number, num_edges)
                edges += found
                strength = found[0].probability if found else 0.0
                if strength > weight:  # one layer's pattern is kept, however many layers there are
                    drawn, pattern, weight = number, probabilities.cpu(), strength
            lens.append(top(model.project_on_vocab(layer.layer_output)[0], number))
        return lens, edges, drawn, pattern

    return block


def layers_with_patterns(model: Model) -> list[int]:
    """The layers whose attention probabilities can be read."""
    return [layer for layer in range(model.num_layers) if model.support(layer)[PATTERN] is None]


def strongest(pattern: Float[Tensor, "head query key"], layer: int, count: int) -> list[Edge]:
    """The `count` strongest edges, strongest first, of queries that are the last of the keys.

    Edges to the first token, where heads rest, and to a query's own token are left out.
    """
    num_queries, num_keys = pattern.shape[1:]
    key = torch.arange(num_keys, device=pattern.device)
    query = key[num_keys - num_queries :, None]
    counted = pattern.masked_fill((key == 0) | (key == query), 0.0)
    found = counted.flatten().topk(min(count, counted.numel()))
    places = torch.stack(torch.unravel_index(found.indices, counted.shape), dim=1)
    edges: list[Edge] = []
    for place, probability in zip(places, found.values, strict=True):
        head, row, column = map(int, place)
        edges.append(Edge(layer, head, row + num_keys - num_queries, column, float(probability)))
    return [edge for edge in edges if edge.probability > 0]


def top(logits: Float[Tensor, "token vocab"], layer: int) -> Top:
    """The most probable token of each row."""
    best = logits.float().softmax(-1).max(-1)
    return Top(layer, [int(number) for number in best.indices], [float(value) for value in best.values])
