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


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Generator[Running]:
    """One family at a time: pytest runs the module's tests for each before it goes on to the next."""
    with running(request.param) as found:
        yield found


def test_every_value_of_a_prompt_alone(family: Running) -> None:
    """Kills: a scale, window, sink, soft cap or head order that is not the model's; halves of a stream; a lost row."""
    family.compare_alone()


def test_every_value_in_company(family: Running) -> None:
    """Kills: rows, positions or blocks of the cache that are another request's."""
    family.compare_company()


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


def test_edits_do_what_raw_hooks_do(family: Running) -> None:
    """Kills: an edit that is dropped, made of another request's rows, or put where the model no longer looks."""
    ids = zoo.prompt(family.family.zoo, 11, seed=SEED)
    plain = family.model.run(ids[0].tolist(), _logits_alone, max_tokens=4, ignore_eos=True).saved["logits"]
    served = [value for value in WRITABLE if _is_compared(family, value)]
    assert len(served) >= (14 if not family.family.missing else 4)
    wrong = {value: far for value in served if (far := _far(family, value, ids, plain))}
    assert not wrong


def _is_compared(family: Running, value: str) -> bool:
    """Whether an edit of it is the same edit in transformers, where heads or places of heads are others at times."""
    own = family.family
    is_of_heads = value.startswith(("attention_queries", "attention_keys", "attention_values"))
    if is_of_heads and (own.pairs_apart or own.zoo == "falcon/40b"):  # whose key heads transformers repeats itself
        return False
    return family.has(_layer(value), value) and value not in own.missing


def _layer(value: str) -> int | None:
    return None if value in OF_THE_MODEL else 1


def _far(family: Running, value: str, ids: Tensor, plain: list[Tensor]) -> str:
    """How an edit in the middle of a batch differs from the same edit by a raw hook; nothing where it does not."""
    want = edited_tokens(family.hf, family.family.zoo, ids, value, _layer(value), edit_of(value), 4)
    other, block = family.prompts[1], _editing(value, _layer(value), ids.shape[1])
    prompts = [other, ids[0].tolist(), other]
    first, result, last = family.model.run(prompts, block, max_tokens=4, ignore_eos=True)
    got = torch.cat([row[0] for row in result.saved["logits"]])
    if result.token_ids != want.token_ids:
        return f"tokens {result.token_ids}, by a raw hook {want.token_ids}"
    near = 1e-4 if family.family.tolerance <= 1e-4 else 5 * family.family.tolerance  # an edit makes more of it
    if (far := float((got - want.logits).abs().max() / want.logits.abs().max())) > near:
        return f"logits are {far:.1e} off"
    if got.equal(torch.cat([row[0] for row in plain])):
        return "nothing changed, so that nothing is shown"
    if any(each.token_ids != tokens_of(family.references[1])[:4] for each in (first, last)):
        return "another request changed"
    return ""


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


def test_the_comparison_kills_mutants(family: Running) -> None:
    """Against the record of a system that makes a mistake, what jackfield reads fails, in each value it spoils."""
    name, is_windowless = family.family.zoo, family.family.over.get("sliding_window", 0) is None
    mistakes = [mistake for mistake, mutant in MUTANTS.items() if name in mutant.models]
    for mistake in mistakes:
        if is_windowless and "window" in mistake:
            continue
        wrong = MUTANTS[mistake].mutate(family.hf, name, family.references[0])
        for value in MUTANTS[mistake].spoils:
            with pytest.raises(AssertionError, match=value):
                family.compare(family.alone.saved["steps"], [_only(step, value) for step in wrong])


def _only(step: Step, value: str) -> Step:
    layers = tuple({name: item for name, item in layer.items() if name == value} for layer in step.layers)
    return replace(step, root={name: item for name, item in step.root.items() if name == value}, layers=layers)
