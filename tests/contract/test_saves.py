"""What a block saves, and what it sees of the outside."""

# `list().save()` is how a block makes a list to save.
# ruff: noqa: C408

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import jackfield as jf

FACTOR = 3.0


@dataclass(frozen=True)
class Pair:
    """Something of the user's own."""

    one: torch.Tensor
    other: int


def scaled(x: torch.Tensor) -> torch.Tensor:
    """A helper with a global of its own."""
    return x * FACTOR


def test_saves_in_all_spellings(model: jf.Model, prompt: list[int]) -> None:
    with model.trace(prompt) as t:
        plain = model.layers[0].layer_input.save()
        first, second = (model.layers[0].layer_output.shape, model.layers[1].layer_input.shape).save()
        third = fourth = model.layers[1].layer_output.sum().item().save()
        annotated: int = t.step.save()
        later = [1]
        later.append(2)
        later.save()
        if (walrus := len(later).save()) > 1:
            branch = "taken".save()
        t.save(named=model.logits)
    assert plain.shape == first == second
    assert third == fourth
    assert (annotated, later, walrus, branch) == (0, [1, 2], 2, "taken")
    assert t.result.saved["named"].shape == (1, 1, model.vocab_size)
    assert set(t.result.saved) == {
        *("plain", "first", "second", "third", "fourth", "annotated", "later", "walrus", "branch", "named"),
    }


def test_a_save_keeps_the_object_as_it_is_at_the_end(model: jf.Model, prompt: list[int]) -> None:
    with model.trace(prompt):
        rows = list().save()
        stream = model.layers[0].layer_output.save()
        stream += 1
        rows.append(model.layers[1].layer_input)
    assert stream.equal(rows[0])


@pytest.mark.parametrize(
    "value",
    [None, 7, 2.5, "text", True, [1, 2], {"a": 1}, (1, (2, 3)), {3, 4}],
    ids=repr,
)
def test_any_object_is_saved(model: jf.Model, prompt: list[int], value: Any) -> None:
    kept = "before"
    with model.trace(prompt):
        kept = value
        kept.save()
    assert kept == value
    assert type(kept) is type(value)


def test_unsaved_names_are_never_changed(model: jf.Model, prompt: list[int]) -> None:
    a, b = 1, 2
    with model.trace(prompt):
        a = None
        b = a.save()
    assert a == 1
    assert b is None


def test_a_nest_is_saved_without_gradients(model: jf.Model, prompt: list[int]) -> None:
    weight = torch.ones(model.hidden_size, requires_grad=True)

    def block(m: jf.Model, t: Any) -> None:
        with torch.enable_grad():
            product = m.layers[0].layer_output * weight
        t.save(pair=Pair(product, 4), nest={"rows": [product[:, 0], product.numpy(force=True)]})

    saved = model.run(prompt, block).saved
    assert not saved["pair"].one.requires_grad
    assert saved["pair"].other == 4
    assert not saved["nest"]["rows"][0].requires_grad
    assert isinstance(saved["nest"]["rows"][1], np.ndarray)


def test_a_saved_value_never_changes_after(model: jf.Model, prompt: list[int]) -> None:
    """Read alone, and among reads of everything that follows it."""
    with model.trace(prompt):
        alone = model.layers[0].attention_norm_output.save()
    with model.trace(prompt):
        kept = model.layers[0].attention_norm_output.save()
        for layer in model.layers:
            _ = layer.attention_queries, layer.attention_output, layer.layer_output
    assert kept.equal(alone)


def test_what_a_function_returns(model: jf.Model, prompt: list[int]) -> None:
    result = model.run(prompt, lambda m, t: (t.step, m.logits.shape))
    assert result.returned == (0, (1, 1, model.vocab_size))


def test_what_a_function_saves(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        x = m.layers[0].layer_output.save()
        t.save(double=x * 2)

    saved = model.run(prompt, block).saved
    assert saved["double"].equal(saved["x"] * 2)


def test_a_save_that_binds_to_nothing_is_refused(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        print(m.logits.save())

    with pytest.raises(jf.UnboundSave, match=r"binds to no name"):
        model.run(prompt, block)


def test_names_from_outside_are_copies(model: jf.Model, prompt: list[int]) -> None:
    direction, options = torch.zeros(model.hidden_size), {"scale": 2.0}
    with model.trace(prompt):
        x = direction
        x += 1
        inside = x.save()
        scale = options["scale"].save()
    assert direction.abs().sum() == 0
    assert inside.sum() == model.hidden_size
    assert scale == 2.0


def test_each_prompt_has_copies_of_its_own(model: jf.Model, prompts: list[list[int]]) -> None:
    counter = torch.zeros(1)

    def block(m: jf.Model, t: Any) -> Any:
        mine = counter
        mine += 1
        m.layers[0].layer_output.sum()
        return mine.item()

    assert [result.returned for result in model.run(prompts, block)] == [1.0, 1.0, 1.0]


def test_parts_of_the_model_are_references_and_helpers_bring_their_globals(model: jf.Model, prompt: list[int]) -> None:
    layer = model.layers[1]
    with model.trace(prompt):
        x = layer.layer_output
        both = (x, scaled(x))
        both.save()
    assert both[1].equal(both[0] * 3.0)


def test_a_change_of_an_outside_object_is_refused(model: jf.Model, prompt: list[int]) -> None:
    acts: list[torch.Tensor] = []
    grid = torch.zeros(3)

    def appends(m: jf.Model, t: Any) -> None:
        acts.append(m.logits)

    def assigns(m: jf.Model, t: Any) -> None:
        grid[0] = m.logits.sum()

    for block, name in ((appends, "acts"), (assigns, "grid")):
        with pytest.raises(jf.UnboundSave, match=rf"changes '{name}'"):
            model.run(prompt, block)


def test_same_names_in_two_requests_stay_apart(model: jf.Model, prompts: list[list[int]]) -> None:
    results = model.run(prompts, lambda m, t: t.save(h=m.input_ids))
    assert [result.saved["h"].tolist() for result in results] == [[prompt] for prompt in prompts]
