"""What must hold inside a record, whatever the model: the check on the reference itself.

Each identity yields what it computed beside what was recorded, so that one comparison, row by row, judges them all.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from tests.reference.attention import Facts
from tests.reference.record import Step

Pairs = Iterator[tuple[str, Tensor, Tensor]]
"""(name of the value, computed, recorded)."""

BROKEN: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("contributions", "gemma3n_text"): "AltUp mixes several streams before and after the sublayers",
        ("middles", "gemma3n_text"): "a learned residual of low rank joins the stream together with the attention",
        ("contributions", "gemma4_text"): "the block adds a per-layer input after its MLP, and scales the whole stream",
    }
)
"""(identity, family) where it does not hold, and why."""

TWICE: Mapping[str, str] = MappingProxyType(
    {"diffllama": "it attends twice, subtracts lambda times the second from the first, and normalises"}
)
"""Families where pattern and values agree in each call, and the layer writes a combination of two calls."""


def calls(values: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The suffixes under which a layer's attention is recorded: none, one, or one per call."""
    if "attention_scores" in values:
        return ("",)
    return tuple(
        sorted(name.removeprefix("attention_scores") for name in values if name.startswith("attention_scores/"))
    )


def repeated(x: Tensor, heads: int) -> Tensor:
    """Key/value heads [1, Hkv, k, d] for each query head: query head h reads h // (H / Hkv)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def contributions(steps: list[Step]) -> Pairs:
    """A layer's input and what its sublayers add are its output."""
    for values in (values for step in steps for values in step.layers):
        total = values["layer_input"] + values["attention_output"] + values["mlp_output"]
        yield "layer_output", total, values["layer_output"]


def middles(steps: list[Step]) -> Pairs:
    """Where sublayers run in sequence, the stream between them is the input and what attention adds."""
    for values in (values for step in steps for values in step.layers):
        if "layer_mid" in values:
            yield "layer_mid", values["layer_input"] + values["attention_output"], values["layer_mid"]


def stream(steps: list[Step]) -> Pairs:
    """A layer's output is the next one's input."""
    for step in steps:
        for above, below in pairwise(step.layers):
            yield "layer_input", above["layer_output"], below["layer_input"]


def head_outputs(steps: list[Step]) -> Pairs:
    """The pattern times the values is what heads write."""
    for values, suffix in attending(steps):
        pattern = values[f"attention_probabilities{suffix}"]
        per_head = repeated(values[f"attention_cached_values{suffix}"].nan_to_num(nan=0.0), pattern.shape[1])
        written = pattern.to(per_head.dtype) @ per_head
        yield "attention_head_outputs", written.transpose(1, 2), values[f"attention_head_outputs{suffix}"]


def patterns(steps: list[Step]) -> Pairs:
    """The softmax of the scores, beside the sink where there is one, is the pattern."""
    for step in steps:
        for values, facts in zip(step.layers, step.facts, strict=True):
            for suffix in calls(values):
                pattern = softmax_of(values[f"attention_scores{suffix}"], facts.sinks if facts else None)
                yield "attention_probabilities", pattern, values[f"attention_probabilities{suffix}"]


def softmax_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The pattern of `scores` [1, H, t, k], with one more thing to attend to where there are sinks [H]."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def scores(steps: list[Step]) -> Pairs:
    """Queries times the cached keys, scaled, capped, then masked, are the scores, where the interface says how."""
    for step in steps:
        for values, facts in zip(step.layers, step.facts, strict=True):
            if facts is None or facts.scale is None:
                continue
            for suffix in calls(values):
                recorded = values[f"attention_scores{suffix}"]
                raw = scores_of(values[f"attention_queries{suffix}"], values[f"attention_cached_keys{suffix}"], facts)
                yield "attention_scores", raw.masked_fill(recorded.isneginf(), -torch.inf), recorded


def scores_of(queries: Tensor, keys: Tensor, facts: Facts) -> Tensor:
    """Scaled and capped, not masked; NaN keys count as zero."""
    assert facts.scale is not None
    per_head = repeated(keys.nan_to_num(nan=0.0).float(), queries.shape[1])
    raw = queries.float() @ per_head.transpose(-1, -2) * facts.scale
    return raw if facts.softcap is None else facts.softcap * (raw / facts.softcap).tanh()


def cache_rows(steps: list[Step]) -> Pairs:
    """This step's keys and values are the last rows of the cache."""
    for values, suffix in attending(steps):
        for which in ("keys", "values"):
            new = values[f"attention_{which}{suffix}"]
            yield f"attention_{which}", values[f"attention_cached_{which}{suffix}"][:, :, -new.shape[2] :], new


def attending(steps: list[Step]) -> Iterator[tuple[Mapping[str, Tensor], str]]:
    """Each layer's values at each step, once per attention in it."""
    for step in steps:
        for values in step.layers:
            for suffix in calls(values):
                yield values, suffix


IDENTITIES: Mapping[str, Callable[[list[Step]], Pairs]] = MappingProxyType(
    {
        "contributions": contributions,
        "middles": middles,
        "stream": stream,
        "head outputs": head_outputs,
        "patterns": patterns,
        "scores": scores,
        "cache rows": cache_rows,
    }
)
