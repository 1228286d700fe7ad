"""Requests out of tables beside blocks and plain ones: each has what it has alone, and what its block would give."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.engines.vllm.tables import tables, trail
from jackfield.interventions import block as intervention_block
from tests.engines.vllm import tiny

PROMPTS = [[6, 20, 13, 28, 9, 17, 30, 44, 51, 2, 90], [11, 25, 8], [14, 22, 7, 31, 19], [5, 6], [7] * 20, [9, 8, 7, 6]]
ARGUMENTS: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    made = tiny.llama()
    yield made
    made.close()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lists(model: jf.Model) -> list[list[jf.Intervention]]:
    """One per prompt: every kind that has a table, several at one site, on heads, at positions; and none."""
    width, head = model.hidden_size, model.head_dim
    directions = numbers(5, width, seed=1)
    return [
        [
            jf.Steer("layers.1.layer_output", numbers(width), 2.0),
            jf.Capture("layers.*.layer_output"),
            jf.Probe("layers.*.mlp_output", directions, 0.5),
        ],
        [
            jf.Project("layers.*.layer_output", directions[:3]),
            jf.Capture("layers.0.layer_mid", "mean"),
            jf.Capture("layers.1.attention_premix", heads=[1, 3]),
            jf.Probe("layers.1.layer_mid", directions, reduce="mean"),
        ],
        [
            jf.Scale("layers.0.mlp_output", 0.0),
            jf.Replace("layers.1.attention_premix", numbers(head, seed=2), heads=[2], positions="generated"),
            jf.Capture("layers.1.attention_output", "last"),
            jf.Capture("layers.0.layer_output", positions=[1, range(3, 8)]),
        ],
        [],
        [
            jf.Skip(1, positions="generated"),
            jf.Steer("layers.0.layer_output", numbers(width, seed=3), 0.5, relative=True, positions=[3, 7, 22]),
        ],
        [jf.Steer("layers.1.layer_output", numbers(width, seed=4)), jf.Capture("layers.1.attention_probabilities")],
    ]


def same(one: jf.Result, other: jf.Result) -> None:
    assert one.token_ids == other.token_ids
    assert list(one.saved) == list(other.saved)
    torch.testing.assert_close(one.saved, other.saved, rtol=1e-4, atol=1e-5)
    assert {name: tensor.dtype for name, tensor in one.saved.items()} == {
        name: tensor.dtype for name, tensor in other.saved.items()
    }


def of(model: jf.Model) -> tables.Tables:
    engine: Any = model._engine
    return engine.llm.llm_engine.model_executor.driver_worker.worker.jackfield.host.tables


def as_blocks(model: jf.Model, monkeypatch: pytest.MonkeyPatch, *given: Any) -> list[jf.Result]:
    with monkeypatch.context() as patched:
        patched.setattr(of(model), "known", None)
        return model.generate(*given, **ARGUMENTS)


def test_in_company_each_has_what_its_block_would_give(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    own = lists(model)
    together = model.generate(PROMPTS, own, **ARGUMENTS)
    plain = model.run(PROMPTS, **ARGUMENTS)
    for one, block in zip(together, as_blocks(model, monkeypatch, PROMPTS, own), strict=True):
        same(one, block)
    for prompt, given, result in zip(PROMPTS, own, together, strict=True):
        same(model.generate(prompt, given, **ARGUMENTS)[0], result)
    edited = [one.token_ids != other.token_ids for one, other in zip(together, plain, strict=True)]
    assert edited == [True, False, True, False, True, True]  # the projection is seen in what is kept
    assert not any(model._engine.held.values())


def test_no_block_runs_where_tables_do(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one runs where an intervention of the list has no table: what a pattern is captured with."""

    def refuse(*_: object) -> Any:
        raise AssertionError("a block ran")

    monkeypatch.setattr(intervention_block, "Running", refuse)
    own = lists(model)
    for prompt, given in zip(PROMPTS[:5], own[:5], strict=True):
        model.generate(prompt, given, **ARGUMENTS)
    with pytest.raises(AssertionError, match="a block ran"):
        model.generate(PROMPTS[5], own[5], **ARGUMENTS)


def test_a_long_trail_is_taken_out_on_the_way(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    own = lists(model)[:3]
    expected = model.generate(PROMPTS[:3], own, **ARGUMENTS)
    monkeypatch.setattr(trail, "LONG", 3)
    monkeypatch.setattr(trail, "CHUNK_BYTES", 1)  # a chunk for each step
    for one, other in zip(model.generate(PROMPTS[:3], own, **ARGUMENTS), expected, strict=True):
        same(one, other)


def test_rows_too_wide_to_stand_beside_each_other_leave_site_by_site(
    model: jf.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackfield.engines.vllm.tables import buffers

    own = lists(model)[:3]
    expected = model.generate(PROMPTS[:3], own, **ARGUMENTS)
    monkeypatch.setattr(buffers, "SMALL_BYTES", 0)
    for one, other in zip(model.generate(PROMPTS[:3], own, **ARGUMENTS), expected, strict=True):
        same(one, other)


def test_without_room_in_the_tables_it_is_a_block(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [jf.Capture("layers.*.mlp_norm_output")]
    expected = model.generate(PROMPTS[0], own, **ARGUMENTS)[0]
    monkeypatch.setattr(tables, "MOST_COLUMNS", 8)
    before = len(of(model).requests)
    same(model.generate(PROMPTS[0], own, **ARGUMENTS)[0], expected)
    assert len(of(model).requests) == before
    monkeypatch.undo()
    same(model.generate(PROMPTS[0], own, **ARGUMENTS)[0], expected)


def test_a_range_that_goes_on_for_ever_is_one_to_the_requests_end(model: jf.Model) -> None:
    def kept(stop: int) -> list[jf.Intervention]:
        steer = jf.Steer("layers.0.layer_output", numbers(model.hidden_size), positions=range(1, stop, 3))
        return [steer, jf.Capture("layers.1.layer_output", positions=range(0, stop, 2))]

    same(*(model.generate(PROMPTS[0], kept(stop), **ARGUMENTS)[0] for stop in (10**12, 40)))


def test_many_directions_are_a_block(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a row's own program would be slow; and largest ones of few."""
    many = [jf.Probe("layers.0.layer_output", numbers(80, model.hidden_size))]
    few = [jf.Probe("layers.0.layer_output", numbers(4, model.hidden_size), top_k=2)]
    for own in (many, few):
        expected = as_blocks(model, monkeypatch, PROMPTS[0], own)[0]
        same(model.generate(PROMPTS[0], own, **ARGUMENTS)[0], expected)
