"""Every value, on every model of the zoo, against transformers and raw hooks: alone and in a padded batch.

The mutants that these comparisons kill are in tests/reference/mutants.py; `test_the_comparison_kills` runs each of them
against what jackfield reads.
"""

from functools import lru_cache
from typing import Any

import pytest
from torch import Tensor

from tests import zoo
from tests.engines.transformers.reading import (
    ALIBI,
    IN_ORDER,
    loaded,
    pairs,
    prompts,
    read_everything,
    references,
    tokens_of,
)
from tests.reference.compare import assert_close
from tests.reference.mutants import MUTANTS
from tests.reference.record import Step

pytestmark = pytest.mark.slow

# What a family does not have, beyond what its structure tells: reasons are in `support()`.
NO_ATTENTION = {"qwen3_next": (0, 1, 2)}


@lru_cache(maxsize=2)
def alone(name: str) -> Any:
    """Everything read of the longest prompt, by itself."""
    return loaded(name).run(prompts(name)[0], read_everything, max_tokens=5, ignore_eos=True)


@lru_cache(maxsize=2)
def batched(name: str) -> list[Any]:
    """Everything read of three prompts of different lengths in one batch."""
    return loaded(name).run(prompts(name), read_everything, max_tokens=5, ignore_eos=True)


def compare(name: str, read: list[dict[Any, Tensor]], steps: list[Step]) -> None:
    """Holds every value of the reference against what was read."""
    assert len(read) == len(steps)
    for found, step in zip(read, steps, strict=True):
        for (layer, value), want in pairs(step):
            assert (layer, value) in found, f"step {step.index}: {value} of layer {layer} was not served"
            where = f"step {step.index}, layer {layer}, "
            assert_close(found[layer, value], want, value, alibi=name in ALIBI, where=where)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_value_of_a_prompt_alone(name: str) -> None:
    result, steps = alone(name), references(name)[0]
    assert result.token_ids == tokens_of(steps)
    compare(name, result.saved["steps"], steps)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_value_in_a_left_padded_batch(name: str) -> None:
    for result, steps in zip(batched(name), references(name), strict=True):
        assert result.token_ids == tokens_of(steps)
        compare(name, result.saved["steps"], steps)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_is_served_beyond_the_reference_is_named_by_it(name: str) -> None:
    """A value that the reference does not know would be a number that nothing checks."""
    known = {key for key, _ in pairs(references(name)[0][0])} | {(None, "next_token_probabilities")}
    assert set(alone(name).saved["steps"][0]) <= known


@pytest.mark.parametrize("name", zoo.NAMES)
def test_reading_everything_changes_no_bit(name: str) -> None:
    plain = loaded(name).run(prompts(name)[0], _logits_alone, max_tokens=5, ignore_eos=True)
    read = alone(name)
    assert read.token_ids == plain.token_ids
    for step, logits in zip(read.saved["steps"], plain.saved["logits"], strict=True):
        assert step[None, "logits"].equal(logits)


def _logits_alone(model: Any, t: Any) -> None:
    t.save(logits=[model.logits for _ in t.iter[:]])


CASES = [(mistake, name) for mistake, mutant in MUTANTS.items() for name in mutant.models]


@pytest.mark.parametrize(("mistake", "name"), CASES, ids=[f"{mistake}: {name}" for mistake, name in CASES])
def test_the_comparison_kills(mistake: str, name: str) -> None:
    """Against the record of a system that makes the mistake, what jackfield reads fails, in each value it spoils."""
    mutant, steps = MUTANTS[mistake], references(name)[0]
    wrong = mutant.mutate(zoo.build(name), name, steps)
    for value in mutant.spoils:
        with pytest.raises(AssertionError, match=value):
            compare(name, alone(name).saved["steps"], [_only(step, value) for step in wrong])


def _only(step: Step, value: str) -> Step:
    from dataclasses import replace

    layers = tuple({name: item for name, item in layer.items() if name == value} for layer in step.layers)
    return replace(step, root={name: item for name, item in step.root.items() if name == value}, layers=layers)


def test_the_block_reads_every_name_of_the_contract() -> None:
    import jackfield as jf

    of_layers = {value.name for value in jf.values() if value.on != "model"}
    assert set(IN_ORDER) == of_layers
