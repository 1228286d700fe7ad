"""A block that reads every value there is, and the references' records to hold it against."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import jackfield as jf
from tests import zoo
from tests.reference.record import Step, record

ALIBI = ("bloom", "bloom/6h", "mpt", "falcon/rw")
IN_ORDER = (
    "layer_input",
    "attention_norm_output",
    "attention_queries_prerotary",
    "attention_keys_prerotary",
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_cached_keys",
    "attention_cached_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
    "attention_premix",
    "attention_head_results",
    "attention_output",
    "layer_mid",
    "mlp_norm_output",
    "router_logits",
    "mlp_activations",
    "mlp_output",
    "layer_output",
)
OF_A_CALL = tuple(name for name in IN_ORDER[2:12])
LENGTHS = (12, 5, 9)  # past a window of 8, and padded twice


@lru_cache(maxsize=2)
def loaded(name: str) -> jf.Model:
    """The zoo model `name`, with eager attention, in jackfield; three prompts to a batch."""
    return jf.Model(zoo.build(name), max_num_seqs=len(LENGTHS))


@lru_cache(maxsize=2)
def references(name: str, steps: int = 5) -> tuple[list[Step], ...]:
    """The reference's records of the prompts, each alone."""
    return tuple(record(zoo.build(name), name, zoo.prompt(name, length, seed=length), steps) for length in LENGTHS)


def prompts(name: str) -> list[list[int]]:
    """The token ids of the prompts."""
    return [zoo.prompt(name, length, seed=length)[0].tolist() for length in LENGTHS]


def read_everything(model: jf.Model, t: Any) -> None:
    """Saves `steps`: per step, every available value by (layer, name), as the reference names them."""
    steps = []
    for _ in t.iter[:]:
        found: dict[tuple[int | None, str], Tensor] = {}
        if model.support()["token_embeddings"] is None:
            found[None, "token_embeddings"] = model.token_embeddings
        for number, layer in enumerate(model.layers):
            read_layer(number, layer, found)
        for name in ("final_norm_output", "logits", "next_token_probabilities"):
            found[None, name] = getattr(model, name)
        steps.append(found)
    t.save(steps=steps)


def read_layer(number: int, layer: Any, found: dict[tuple[int | None, str], Tensor]) -> None:
    """Reads a layer's values in order; an attention of several calls has each under `name/call`."""
    missing = {name for name, reason in layer.support().items() if reason is not None}
    several = "attention_queries" in missing and "attention_premix" not in missing
    for name in IN_ORDER:
        if several and name == "attention_premix":
            for call, part in enumerate(layer.attention.calls):
                found |= {(number, f"{of}/{call}"): getattr(part, of) for of in OF_A_CALL[2:]}
        if name not in missing:
            found[number, name] = getattr(layer, name)


def pairs(step: Step) -> list[tuple[tuple[int | None, str], Tensor]]:
    """The reference's values of one step, by (layer, name)."""
    of_root = [((None, name), value) for name, value in step.root.items()]
    layers = enumerate(step.layers)
    return of_root + [((number, name), value) for number, layer in layers for name, value in layer.items()]


def tokens_of(steps: Sequence[Step]) -> list[int]:
    """What the reference generated."""
    return [step.next_token for step in steps]


def worst(tensors: Sequence[Tensor]) -> float:
    """The largest entry of several tensors."""
    return max(float(torch.nan_to_num(tensor, neginf=0.0).abs().max()) for tensor in tensors)
