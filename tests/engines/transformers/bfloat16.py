"""What is read in bfloat16 against the reference in bfloat16: how far it may be, and how far it is.

The weights are the zoo's in float32, rounded. Reference and jackfield run on the same machine, so that the model's own
products are rounded alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

import jackfield as jf
from tests import zoo
from tests.engines.transformers.reading import ALIBI, LENGTHS, pairs, prompts, read_everything
from tests.reference.compare import TOLERANCE, plain, row_error
from tests.reference.record import Step, record

STEPS = 5
BFLOAT16: Final = TOLERANCE[torch.bfloat16]


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far the rows of one value of one model may be, and why that is more than of all others."""

    tolerance: float
    reason: str


ROUNDED = (
    "the model rounds its scores to bfloat16 before the softmax; where they are large, one step of the rounding is a "
    "large part of a weight. jackfield computes both in float32"
)
SHIFTED = (
    "the model takes each row's maximum off before it rounds to bfloat16; a score near zero, put together again, "
    "carries the rounding of that maximum"
)
NEEDS_MORE: Mapping[tuple[str, str], Allowance] = MappingProxyType(
    {
        ("gpt_bigcode/noscale", "attention_probabilities"): Allowance(3e-2, ROUNDED),
        ("granite", "attention_probabilities"): Allowance(3e-2, ROUNDED),
        ("granite_swa", "attention_probabilities"): Allowance(4e-2, ROUNDED),
        ("gpt_oss", "attention_probabilities"): Allowance(6e-2, ROUNDED),
        ("gemma3n_text", "attention_probabilities"): Allowance(3e-2, ROUNDED),
        ("gemma4_text", "attention_probabilities"): Allowance(4e-2, ROUNDED),
        ("mimo_v2_flash", "attention_scores"): Allowance(1e-1, SHIFTED),
    }
)


def allowed(name: str, value: str) -> float:
    """The tolerance per row of `value` on the zoo model `name`."""
    more = NEEDS_MORE.get((name, plain(value)))
    return BFLOAT16 if more is None else more.tolerance


def model_of(name: str) -> PreTrainedModel:
    """The zoo model in bfloat16."""
    return zoo.build(name, dtype=torch.bfloat16)


@lru_cache(maxsize=2)
def _loaded(name: str) -> jf.Model:
    return jf.Model(model_of(name), max_num_seqs=len(LENGTHS))


@lru_cache(maxsize=2)
def reference(name: str) -> tuple[list[Step], ...]:
    """The records of the prompts, each alone."""
    return tuple(record(model_of(name), name, torch.tensor([ids]), STEPS) for ids in prompts(name))


@lru_cache(maxsize=2)
def alone(name: str) -> jf.Result:
    """Everything read of the longest prompt, by itself."""
    return _loaded(name).run(prompts(name)[0], read_everything, max_tokens=STEPS, ignore_eos=True)


@lru_cache(maxsize=2)
def batched(name: str) -> list[jf.Result]:
    """Everything read of all prompts in one left-padded batch."""
    return _loaded(name).run(prompts(name), read_everything, max_tokens=STEPS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the worst row of one value of one layer is at one step."""

    value: str
    layer: int | None
    step: int
    error: float


def distances(name: str, result: jf.Result, steps: Sequence[Step]) -> Iterator[Distance]:
    """Of everything that the reference has, while both have chosen the same tokens; infinite where it was not read."""
    for found, step in zip(result.saved["steps"], steps, strict=True):
        for (layer, value), want in pairs(step):
            got: Tensor | None = found.get((layer, value))
            error = torch.inf if got is None else row_error(got, want, value, alibi=name in ALIBI)
            yield Distance(value, layer, step.index, error)
        if result.token_ids[step.index] != step.next_token:
            return


@dataclass(frozen=True, slots=True)
class Measured:
    """The worst row of one value over all models that keep to the common tolerance, and the model it is on."""

    value: str
    alone: tuple[float, str]
    batched: tuple[float, str]


def measured() -> list[Measured]:
    """Of every value, over the whole zoo."""
    worst: dict[str, dict[str, tuple[float, str]]] = {}
    for name in zoo.NAMES:
        runs: list[tuple[str, Any, Any]] = [("alone", alone(name), reference(name)[0])]
        runs += [("batched", *pair) for pair in zip(batched(name), reference(name), strict=True)]
        for way, result, steps in runs:
            for distance in distances(name, result, steps):
                value = plain(distance.value)
                if (name, value) not in NEEDS_MORE:
                    of = worst.setdefault(value, {"alone": (-1.0, ""), "batched": (-1.0, "")})
                    of[way] = max(of[way], (distance.error, name))
    return [Measured(value, **ways) for value, ways in worst.items()]
