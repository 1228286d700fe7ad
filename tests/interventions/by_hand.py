"""The same edits written as blocks, row by row, and what either way leaves of a run.

Nothing here is shared with `jackfield.interventions`: positions are spelled out, formulas are those of the contract.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jackfield as jf

MAX_TOKENS = 4
LENGTH = 7  # of the first prompt of every Subject; its positions are 0 to 9 in a run of MAX_TOKENS

Edit = Callable[[Any, list[int]], Tensor | None]
"""Edits one step of a model: the absolute positions of its rows are given. What edits logits gives the last stream."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Left:
    """What a run leaves: the tokens, the rows of the last layer's stream, and the logits they were sampled from."""

    tokens: list[int]
    stream: Tensor
    logits: Tensor

    def close_to(self, other: "Left") -> bool:
        same = self.tokens == other.tokens and self.stream.shape == other.stream.shape
        return same and all(
            torch.allclose(one, another, rtol=2e-4, atol=2e-4)
            for one, another in ((self.stream, other.stream), (self.logits, other.logits))
        )


def by_block(model: jf.Model, prompt: list[int], edit: Edit) -> Left:
    """A block that edits each step."""

    def block(m: Any, t: Any) -> Any:
        streams, logits = [], []
        for _ in t.iter[:]:
            stream = edit(m, t.positions.tolist())
            streams.append(m.layers[-1].layer_output[0] if stream is None else stream)
            logits.append(m.logits[0])
        return torch.cat(streams), torch.cat(logits)

    result = model.run(prompt, block, max_tokens=MAX_TOKENS, ignore_eos=True)
    return Left(result.token_ids, *result.returned)


def left(model: jf.Model, result: jf.Result) -> Left:
    """What a run of `watched` interventions left."""
    return Left(result.token_ids, result.saved[f"layers.{model.num_layers - 1}.layer_output"], result.saved["logits"])


def watched(model: jf.Model, interventions: Sequence[jf.Intervention]) -> list[jf.Intervention]:
    """The interventions, then captures of what is compared."""
    last = f"layers.{model.num_layers - 1}.layer_output"
    return [*interventions, jf.Capture(last), jf.Capture("logits")]


def by_data(model: jf.Model, prompt: list[int], interventions: Sequence[jf.Intervention]) -> Left:
    """The interventions alone beside one prompt."""
    watching = watched(model, interventions)
    (result,) = model.generate(prompt, watching, max_tokens=MAX_TOKENS, ignore_eos=True)
    return left(model, result)


def rows_at(positions: list[int], wanted: set[int]) -> list[int]:
    return [row for row, position in enumerate(positions) if position in wanted]


# -- cases: interventions for a model, and the block's edit of one step


@dataclass(frozen=True)
class Case:
    data: Callable[[jf.Model], list[jf.Intervention]]
    edit: Callable[[jf.Model], Edit]


def steer(model: jf.Model) -> Edit:
    vector = 2.0 * numbers(model.hidden_size)

    def edit(m: Any, positions: list[int]) -> None:
        m.layers[0].layer_output[:] += vector

    return edit


def steer_relative(model: jf.Model) -> Edit:
    vector = numbers(model.hidden_size)

    def edit(m: Any, positions: list[int]) -> None:
        stream = m.layers[0].layer_output
        stream += 0.3 * stream.pow(2).sum(-1, keepdim=True).sqrt() * vector

    return edit


def steer_one_head(model: jf.Model) -> Edit:
    vector = numbers(model.head_dim)

    def edit(m: Any, positions: list[int]) -> None:
        for row in rows_at(positions, {6, 7, 8, 9}):
            m.layers[1].attention_head_outputs[0, row, 1] += 5.0 * vector

    return edit


def steer_every_layer(model: jf.Model) -> Edit:
    vector = numbers(model.hidden_size)

    def edit(m: Any, positions: list[int]) -> None:
        for layer in m.layers:
            layer.mlp_output += 0.5 * vector

    return edit


def steer_logits(model: jf.Model) -> Edit:
    vector = 9.0 * numbers(model.vocab_size)

    def edit(m: Any, positions: list[int]) -> Tensor:
        stream = m.layers[-1].layer_output[0].clone()
        if positions[-1] in {7, 9}:
            m.logits[0, 0] += vector
        return stream

    return edit


def dependent(model: jf.Model) -> Tensor:
    one, other = numbers(2, model.hidden_size, seed=1)
    return torch.stack([one, other * 1e-4, 3 * one - 2 * other, torch.zeros_like(one)])


def project_dependent(model: jf.Model) -> Edit:
    one, other = numbers(2, model.hidden_size, seed=1)
    one = one / one.norm()
    other = other - (other @ one) * one
    other = other / other.norm()

    def edit(m: Any, positions: list[int]) -> None:
        stream = m.layers[0].layer_output
        for direction in (one, other):
            stream -= 0.75 * (stream @ direction)[..., None] * direction

    return edit


def scale_queries(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        m.layers[0].attention_queries[:, [1]] *= -0.5

    return edit


def scale_keys(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        for row in rows_at(positions, {1, 2, 8}):
            m.layers[0].attention_keys[:, :, row] *= 3.0

    return edit


def flat_scores(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        scores = m.layers[0].attention_scores
        for row in rows_at(positions, {3, 6, 7}):
            scores[0, 0, row] = torch.where(scores[0, 0, row].isneginf(), -torch.inf, 0.0)

    return edit


def knock_out_then_flatten(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        scores = m.layers[0].attention_scores
        scores[..., 2] = -torch.inf
        scores[:] = torch.where(scores.isneginf(), -torch.inf, 0.0)

    return edit


def ablate_neurons(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        m.layers[0].mlp_activations[:] = 0

    return edit


def replace_rows(model: jf.Model) -> Edit:
    value = numbers(model.hidden_size)

    def edit(m: Any, positions: list[int]) -> None:
        for row in rows_at(positions, {2, 3, 4, 8}):
            m.layers[0].attention_output[0, row] = value

    return edit


def skip_all(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        m.layers[1].skip()

    return edit


def skip_some(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        entering = m.layers[1].layer_input.clone()
        leaving = m.layers[1].layer_output
        for row in rows_at(positions, {0, 5, 6, 9}):
            leaving[0, row] = entering[0, row]

    return edit


def skip_after_steering(model: jf.Model) -> Edit:
    vector = numbers(model.hidden_size)

    def edit(m: Any, positions: list[int]) -> None:
        stream = m.layers[1].layer_input
        stream += vector
        entering = stream.clone()
        m.layers[1].layer_output = entering + vector

    return edit


def knock_out(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        for layer in m.layers[:2]:
            scores = layer.attention_scores
            for row in rows_at(positions, {0, 4, 6, 7, 8, 9}):
                for key in (1, 2, 3, 7):
                    if key <= positions[row]:
                        scores[0, 1, row, key] = -torch.inf

    return edit


def steer_then_halve(model: jf.Model) -> Edit:
    vector = numbers(model.hidden_size)

    def edit(m: Any, positions: list[int]) -> None:
        stream = m.layers[0].layer_output
        stream[:] = (stream + vector) * 0.5

    return edit


def two_layers(model: jf.Model) -> Edit:
    def edit(m: Any, positions: list[int]) -> None:
        m.layers[0].attention_output *= 2.0
        m.layers[1].mlp_output *= 0.25

    return edit


CASES: dict[str, Case] = {
    "steer": Case(lambda m: [jf.Steer("layers.0.layer_output", numbers(m.hidden_size), 2.0)], steer),
    "steer, relative": Case(
        lambda m: [jf.Steer("layers.0.layer_output", numbers(m.hidden_size), 0.3, True)], steer_relative
    ),
    "steer one head": Case(
        lambda m: [
            jf.Steer("layers.1.attention_head_outputs", numbers(m.head_dim), scale=5.0, positions="generated", heads=1)
        ],
        steer_one_head,
    ),
    "steer every layer": Case(
        lambda m: [jf.Steer("layers.*.mlp_output", numbers(m.hidden_size), 0.5)], steer_every_layer
    ),
    "steer the logits": Case(
        lambda m: [jf.Steer("logits", numbers(m.vocab_size), 9.0, positions=[2, 7, 9])], steer_logits
    ),
    "project": Case(lambda m: [jf.Project("layers.0.layer_output", dependent(m), strength=0.75)], project_dependent),
    "scale queries": Case(lambda m: [jf.Scale("layers.0.attention_queries", -0.5, heads=[1])], scale_queries),
    "scale keys": Case(lambda m: [jf.Scale("layers.0.attention_keys", 3.0, positions=[1, 2, 8])], scale_keys),
    "scale scores by 0": Case(
        lambda m: [jf.Scale("layers.0.attention_scores", 0, positions=[3, 6, 7], heads=[0])], flat_scores
    ),
    "knock out, then scale by 0": Case(
        lambda m: [jf.Knockout(0, keys=2), jf.Scale("layers.0.attention_scores", 0)], knock_out_then_flatten
    ),
    "ablate neurons": Case(lambda m: [jf.Scale("layers.0.mlp_activations", 0)], ablate_neurons),
    "replace": Case(
        lambda m: [
            jf.Replace("layers.0.attention_output", numbers(m.hidden_size), positions=[range(2, 5), 8]),
        ],
        replace_rows,
    ),
    "skip": Case(lambda m: [jf.Skip(1)], skip_all),
    "skip at positions": Case(lambda m: [jf.Skip([1], positions=[0, 5, 6, 9])], skip_some),
    "skip what was steered": Case(
        lambda m: [
            jf.Skip("1-1"),
            jf.Steer("layers.1.layer_output", numbers(m.hidden_size)),
            jf.Steer("layers.1.layer_input", numbers(m.hidden_size)),
        ],
        skip_after_steering,
    ),
    "knock out": Case(
        lambda m: [jf.Knockout("0-1", queries=[0, 4, range(6, 99)], keys=[range(1, 4), 7], heads=[1])], knock_out
    ),
    "two at one site": Case(
        lambda m: [
            jf.Steer("layers.0.layer_output", numbers(m.hidden_size)),
            jf.Scale("layers.0.layer_output", 0.5),
        ],
        steer_then_halve,
    ),
    "layers against the order": Case(
        lambda m: [jf.Scale("layers.1.mlp_output", 0.25), jf.Scale("layers.0.attention_output", 2.0)], two_layers
    ),
}
