"""Tiny heated models of transformers, the same weights in the native Llama, and every value of its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # settings of a configuration

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackfield.engines.inline import OPERANDS
from jackfield.engines.llama.checkpoint import load
from jackfield.engines.llama.layers import Transformer
from tests import zoo
from tests.reference.compare import row_error
from tests.reference.record import Step

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("llama", {}),
    "a head each": ("llama", {"num_key_value_heads": 4}),
    "one key head": ("llama/mqa", {}),
    "eight heads": ("llama/8h", {}),
    "free head width": ("llama/hd", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 scaling": ("llama", {"rope_parameters": _LLAMA3}),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
}
"""A zoo name and what its configuration changes."""

ROOT = ("token_embeddings", "final_norm_output", "logits")
LAYER = (
    "layer_input", "attention_norm_output", "attention_queries_prerotary", "attention_keys_prerotary",
    "attention_queries", "attention_keys", "attention_values", "attention_cached_keys", "attention_cached_values",
    "attention_scores", "attention_probabilities", "attention_head_outputs", "attention_premix", "attention_output",
    "layer_mid", "mlp_norm_output", "mlp_activations", "mlp_output", "layer_output",
)  # fmt: skip
"""Every value that the modules announce, in the order of the contract."""
PART_OF = {"attention_keys": "attention_cached_keys", "attention_values": "attention_cached_values"}
"""This step's rows of what the cache holds."""


def both(case: str, folder: Path, **cache: int) -> tuple[PreTrainedModel, Transformer]:
    """The model of a case, and the native one with its weights, by way of `folder`."""
    name, over = CASES[case]
    theirs = zoo.build(name, fresh=True, **over)
    theirs.save_pretrained(folder)
    return theirs, load(folder, **{"max_seq_len": 64, **cache})


class Recorder:
    """A tap that copies the values it wants, and hands on what `edits` makes of them."""

    def __init__(self, wanted: Sequence[str] = (*ROOT, *LAYER), **edits: Any) -> None:
        self.wanted = frozenset(wanted)
        self.edits = edits
        self.order: list[tuple[str, int | None]] = []
        self.values: dict[tuple[str, int | None], Tensor] = {}

    def listens(self, name: str, layer: int | None) -> bool:
        wanted = self.wanted.union(self.edits)
        return name in wanted or (name in OPERANDS and not wanted.isdisjoint((*OPERANDS, *PART_OF)))

    def operands(self, tensors: Mapping[str, Tensor], layer: int | None) -> Mapping[str, Tensor]:
        taken = dict(tensors)
        for name, whole in PART_OF.items():
            if whole in tensors and (name in self.wanted or name in self.edits):
                past, new = tensors[whole].tensor_split([-tensors["attention_queries"].shape[2]], 2)
                edited = self._taken(name, layer, new)
                taken[whole] = tensors[whole] if edited is new else torch.cat([past, edited], 2)
        return {
            name: self._taken(name, layer, value) if name in self.wanted or name in self.edits else value
            for name, value in taken.items()
        }

    def _taken(self, name: str, layer: int | None, value: Tensor) -> Tensor:
        self.order.append((name, layer))
        self.values[name, layer] = value.detach().clone()
        return self.edits[name](value) if name in self.edits else value


@torch.no_grad()
def errors(model: Transformer, steps: Sequence[Step]) -> dict[str, float]:
    """For each value, the error of its worst row over all layers and steps of a recorded run."""
    worst: dict[str, float] = {}
    for step in steps:
        recorder = Recorder()
        model.listen(recorder)
        model(step.input_ids, int(step.positions[0]), last_row=True)
        for (name, layer), got in recorder.values.items():
            want = step.get(name, layer)
            assert want is not None
            worst[name] = max(worst.get(name, 0.0), row_error(got, want, name))
    model.listen(None)
    return worst
