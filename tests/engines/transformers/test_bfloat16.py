"""Every value in bfloat16, on every model of the zoo, per row; and that mistakes are still seen at that tolerance."""

import pytest
import torch

from tests import zoo
from tests.engines.transformers.bfloat16 import (
    BFLOAT16,
    NEEDS_MORE,
    ROUNDED,
    allowed,
    alone,
    batched,
    distances,
    model_of,
    reference,
)
from tests.reference.compare import row_error
from tests.reference.identities import repeated, softmax_of
from tests.reference.mutants import MUTANTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_value_alone_and_in_a_left_padded_batch(name: str) -> None:
    """In a batch products have another size and may be rounded otherwise; once a token differs the rest is let be."""
    assert alone(name).token_ids == [step.next_token for step in reference(name)[0]]
    found = list(distances(name, alone(name), reference(name)[0]))
    for result, steps in zip(batched(name), reference(name), strict=True):
        together = list(distances(name, result, steps))
        assert {each.step for each in together} >= {0, 1}
        found += together
    assert [each for each in found if each.error > allowed(name, each.value)] == []
    for value in [value for model, value in NEEDS_MORE if model == name]:
        largest = max(each.error for each in found if each.value == value)
        assert BFLOAT16 < largest < allowed(name, value) < 2 * largest, "it is allowed more than it needs"


@pytest.mark.parametrize("name", [name for (name, _), more in NEEDS_MORE.items() if more.reason == ROUNDED])
def test_where_a_pattern_needs_more_it_is_the_model_that_rounds(name: str) -> None:
    """What is served is the softmax of the model's own queries and keys, done in float64."""
    for found, step in zip(alone(name).saved["steps"], reference(name)[0], strict=True):
        for layer, (values, facts) in enumerate(zip(step.layers, step.facts, strict=True)):
            assert facts is not None
            assert facts.softcap is None
            queries, keys = (found[layer, f"attention_{of}"].double() for of in ("queries", "cached_keys"))
            scores = queries @ repeated(keys.nan_to_num(), queries.shape[1]).mT * facts.scale
            exact = softmax_of(scores.masked_fill(values["attention_scores"].isneginf(), -torch.inf), facts.sinks)
            assert row_error(found[layer, "attention_probabilities"], exact, "attention_probabilities") < 1e-4


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("tiled heads", "llama"),
        ("another request", "llama"),
        ("window of W + 1", "mistral"),
        ("scale of 1 / sqrt(d)", "gemma2"),
        ("cap after the mask", "gemma2"),
        ("part before its norm", "gemma2"),
        ("part without its multiplier", "granite"),
        ("positions after the padding", "gpt2"),
        ("queries, keys, values in a row", "gpt_neox"),
    ],
)
def test_the_comparison_kills(mistake: str, name: str) -> None:
    mutant = MUTANTS[mistake]
    wrong = mutant.mutate(model_of(name), name, list(reference(name)[0]))
    found = [each for each in distances(name, alone(name), wrong) if each.error > allowed(name, each.value)]
    assert {each.value for each in found} >= set(mutant.spoils)
