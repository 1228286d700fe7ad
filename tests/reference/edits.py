"""An edit by raw hook: one value of one layer changed at every step, and what the model then says.

edited = edited_tokens(model, "llama", ids, "attention_output", 2, lambda x: 0 * x, steps=4)
edited.token_ids, edited.logits          # 4 tokens, [4, vocab]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.reference.families import family_of
from tests.reference.record import Step, record

WRITABLE: tuple[str, ...] = (
    "token_embeddings",
    "layer_input",
    "attention_norm_output",
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
    "attention_premix",
    "attention_output",
    "layer_mid",
    "mlp_norm_output",
    "router_logits",
    "mlp_activations",
    "mlp_output",
    "layer_output",
    "final_norm_output",
    "logits",
)
"""What an edit can reach, in the order of the forward pass."""

HIDDEN: Mapping[str, float] = MappingProxyType({"attention_scores": -inf, "attention_probabilities": 0.0})
"""What stands where a query may not look."""

OF_THE_MODEL: frozenset[str] = frozenset({"token_embeddings", "final_norm_output", "logits"})


@dataclass(frozen=True, slots=True)
class Edited:
    """What an edited run generated: the tokens, and the logits each was taken from, [steps, vocab]."""

    token_ids: list[int]
    logits: Tensor


class Edit:
    """A visitor that changes one value. The function gets a copy in the contract's shape and returns what it becomes.

    A result equal to what was there is not written, so that an edit that changes nothing changes no bit. What the mask
    hides stays hidden, whatever is written to scores or pattern.
    """

    def __init__(self, value: str, layer: int | None, change: Callable[[Tensor], Tensor]) -> None:
        self._value = value
        self._layer = layer
        self._change = change
        self._input: Tensor | None = None
        self._masked: Tensor | None = None
        self.seen = 0

    def __call__(self, layer: int | None, name: str, x: Tensor) -> Tensor:
        if layer != self._layer:
            return x
        if name == "attention_scores":
            self._masked = x.isneginf()
        if name == "attention_output" and self._value == "layer_mid":
            x = self._apply_to_middle(x)
        elif name == self._value != "layer_mid":
            x = self._apply(x)
        if name == "layer_input":
            self._input = x.clone()
        return x

    def _apply(self, x: Tensor) -> Tensor:
        self.seen += 1
        changed = self._change(x.clone())
        if self._value in HIDDEN:
            assert self._masked is not None, "scores come before the pattern"
            changed = changed.masked_fill(self._masked, HIDDEN[self._value])
        return x if torch.equal(changed, x) else changed

    def _apply_to_middle(self, attention_output: Tensor) -> Tensor:
        """The stream in the middle is read twice, by the norm and by the next add: both see the attention's part."""
        assert self._input is not None
        middle = self._input + attention_output
        changed = self._apply(middle)
        return attention_output if changed is middle else changed - self._input


def edited_record(
    model: PreTrainedModel,
    name: str,
    prompt_ids: Tensor,
    value: str,
    layer: int | None,
    change: Callable[[Tensor], Tensor],
    steps: int,
) -> list[Step]:
    """Every value of a run in which `change` is applied to `value` of `layer` (None: of the model) at every step.

    Raises:
        ValueError: the value cannot be written, this layer has none, or what the cache holds is not it.
    """
    if value not in WRITABLE or (value in OF_THE_MODEL) != (layer is None):
        raise ValueError(f"{value!r} of layer {layer} is not a value that can be edited; those are {WRITABLE}")
    if value in {"attention_keys", "attention_values"} and family_of(model, name).keys_at != "cache":
        raise ValueError(f"{name}: the cache does not hold {value}, so an edited row would not be what it holds")
    edit = Edit(value, layer, change)
    done = record(model, name, prompt_ids, steps, edit=edit)
    if edit.seen != steps:
        raise ValueError(f"{name}: layer {layer} showed {value!r} {edit.seen} times in {steps} steps")
    return done


def edited_tokens(
    model: PreTrainedModel,
    name: str,
    prompt_ids: Tensor,
    value: str,
    layer: int | None,
    change: Callable[[Tensor], Tensor],
    steps: int,
) -> Edited:
    """The tokens and logits of `edited_record`."""
    done = edited_record(model, name, prompt_ids, value, layer, change, steps)
    return Edited([step.next_token for step in done], torch.cat([step.root["logits"][0] for step in done]))
