"""Every value, on models that vLLM has itself and on transformers' models inside of vLLM, against raw hooks.

One engine per family, closed before the next one starts. `test_the_comparison_kills` runs the mistakes of
tests/reference/mutants.py against what jackfield reads.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from tests import zoo
from tests.engines.transformers.reading import pairs, tokens_of
from tests.engines.transformers.test_edits import edit_of
from tests.engines.vllm.families import FAMILIES, SEED, STEPS, Running, running
from tests.reference.edits import OF_THE_MODEL, WRITABLE, edited_tokens
from tests.reference.mutants import MUTANTS
from tests.reference.record import Step

pytestmark = pytest.mark.slow

EDITED = ("llama", "gemma2", "granite", "gpt2", "cohere", "opt", "exaone4", "mixtral", "gpt_oss")


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Generator[Running]:
    """One family at a time: pytest runs the module's tests for each before it goes on to the next."""
    with running(request.param) as found:
        yield found


def test_every_value_of_a_prompt_alone(family: Running) -> None:
    """Kills: a scale, window, sink, soft cap or head order that is not the model's; halves of a stream; a lost row."""
    assert family.alone.token_ids == tokens_of(family.references[0])
    family.compare(family.alone.saved["steps"], family.references[0])


def test_every_value_in_company(family: Running) -> None:
    """Kills: rows, positions or blocks of the cache that are another request's."""
    for result, steps in zip(family.company, family.references, strict=True):
        assert result.token_ids == tokens_of(steps)
        family.compare(result.saved["steps"], steps)


def test_what_is_not_served_says_why(family: Running) -> None:
    """Kills: a value that goes missing unseen."""
    known = {key for key, _ in pairs(family.references[0][0])}
    missing = known - set(family.alone.saved["steps"][0])
    assert {name for _, name in missing} == set(family.family.missing)
    for layer, name in missing:
        assert family.family.missing[name] in str(family.model.support(layer)[name])


def test_what_is_served_beyond_the_reference_is_named_by_it(family: Running) -> None:
    """A value that the reference does not know would be a number that nothing checks."""
    known = {key for key, _ in pairs(family.references[0][0])}
    assert set(family.alone.saved["steps"][0]) <= known


def test_reading_everything_changes_no_bit(family: Running) -> None:
    plain = family.model.run(family.prompts[0], _logits_alone, max_tokens=STEPS, ignore_eos=True)
    assert family.alone.token_ids == plain.token_ids
    for step, logits in zip(family.alone.saved["steps"], plain.saved["logits"], strict=True):
        assert step[None, "logits"].equal(logits)


def _logits_alone(model: Any, t: Any) -> None:
    t.save(logits=[model.logits for _ in t.iter[:]])


@pytest.mark.parametrize("value", WRITABLE)
def test_an_edit_does_what_a_raw_hook_does(family: Running, value: str) -> None:
    """Kills: an edit that is dropped, made of another request's rows, or put where the model no longer looks."""
    if family.family.zoo not in EDITED or family.family.backend != "vllm":
        pytest.skip("not one of the families that edits are shown on")
    layer = None if value in OF_THE_MODEL else 1
    reason = family.model.support(layer)[value]
    if reason is not None:
        assert value in family.family.missing or not family.has(layer, value), reason
        pytest.skip(reason)
    ids, edit = zoo.prompt(family.family.zoo, 11, seed=SEED), edit_of(value)
    want = edited_tokens(family.hf, family.family.zoo, ids, value, layer, edit, 4)
    other = family.prompts[1]
    results = family.model.run([other, ids[0].tolist(), other], _editing(value, layer, ids.shape[1]), max_tokens=4)
    got = torch.cat([row[0] for row in results[1].saved["logits"]])
    assert results[1].token_ids == want.token_ids
    assert float((got - want.logits).abs().max() / want.logits.abs().max()) < 10 * family.family.tolerance
    assert not got.equal(_plain(family, ids)), "the edit changed nothing, so the test shows nothing"
    assert all(result.token_ids == tokens_of(family.references[1])[:4] for result in (results[0], results[2]))


def _editing(value: str, layer: int | None, length: int) -> Any:
    """A block that edits in the request of `length` prompt tokens, and in no other."""
    edit = edit_of(value)

    def block(model: jf.Model, t: Any) -> None:
        logits = []
        is_edited = len(t.positions) == length
        for _ in t.iter[:]:
            if is_edited:
                part = model if layer is None else model.layers[layer]
                setattr(part, value, edit(getattr(part, value)))
            logits.append(model.logits)
        t.save(logits=logits)

    return block


def _plain(family: Running, ids: Tensor) -> Tensor:
    result = family.model.run(ids[0].tolist(), _logits_alone, max_tokens=4, ignore_eos=True)
    return torch.cat([row[0] for row in result.saved["logits"]])


@pytest.mark.parametrize("mistake", MUTANTS)
def test_the_comparison_kills(family: Running, mistake: str) -> None:
    """Against the record of a system that makes the mistake, what jackfield reads fails, in each value it spoils."""
    mutant, name = MUTANTS[mistake], family.family.zoo
    if name not in mutant.models:
        pytest.skip("the mistake does not show on this family")
    for value in mutant.spoils:
        wrong = mutant.mutate(family.hf, name, family.references[0])
        with pytest.raises(AssertionError, match=value):
            family.compare(family.alone.saved["steps"], [_only(step, value) for step in wrong])


def _only(step: Step, value: str) -> Step:
    layers = tuple({name: item for name, item in layer.items() if name == value} for layer in step.layers)
    return replace(step, root={name: item for name, item in step.root.items() if name == value}, layers=layers)
