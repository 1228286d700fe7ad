"""Steps, positions and stopping: what a block reads when."""

# `list().save()` is how a block makes a list to save.
# ruff: noqa: C408

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import jackfield as jf
from tests.contract.conftest import subject


@pytest.mark.parametrize(
    ("spelling", "steps"),
    [
        (slice(4), [0, 1, 2, 3]),
        (slice(None), [0, 1, 2, 3, 4]),
        (slice(1, None), [1, 2, 3, 4]),
        (slice(0, None, 2), [0, 2, 4]),
        (2, [2]),
        ([1, 3], [1, 3]),
        (slice(0), []),
        (slice(90), [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_steps_are_what_was_asked(model: jf.Model, prompt: list[int], spelling: Any, steps: list[int]) -> None:
    with model.trace(prompt, max_tokens=5, ignore_eos=True) as t:
        seen = list().save()
        for step in t.iter[spelling]:
            seen.append((step, t.step, model.layers[0].attention_probabilities.shape, model.input_ids.tolist()))
    plain = model.run(prompt, max_tokens=5, ignore_eos=True).token_ids
    heads = model.num_heads
    rows = [prompt if step == 0 else [plain[step - 1]] for step in steps]
    assert seen == [
        (step, step, (1, heads, len(row), len(prompt) + step), [row]) for step, row in zip(steps, rows, strict=True)
    ]


def test_positions_are_absolute(model: jf.Model, prompts: list[list[int]]) -> None:
    with model.trace(prompts, max_tokens=3, ignore_eos=True) as t:
        seen = list().save()
        for _ in t.iter[:]:
            seen.append(t.positions.tolist())
    assert seen == [[list(range(len(prompt))), [len(prompt)], [len(prompt) + 1]] for prompt in prompts]


@settings(max_examples=12)
@given(
    steps=st.lists(st.integers(0, 7), unique=True).map(sorted), max_tokens=st.integers(1, 5), length=st.integers(1, 9)
)
def test_any_ascending_steps(steps: list[int], max_tokens: int, length: int) -> None:
    """On the scripted engine: what is cheap is tried often."""

    def block(m: jf.Model, t: Any) -> Any:
        return [(step, t.positions.tolist(), m.layers[1].attention_scores.shape[-1]) for step in t.iter[steps]]

    model = subject("fake").model
    result = model.run(list(range(6, 6 + length)), block, max_tokens=max_tokens, ignore_eos=True)
    came = [step for step in steps if step < max_tokens]
    positions = [list(range(length)) if step == 0 else [length - 1 + step] for step in came]
    assert result.returned == [(step, at, length + step) for step, at in zip(came, positions, strict=True)]


@pytest.mark.parametrize(
    "spelling",
    [
        *([3, 1], [1, 1], -1, [True], 1.5, "1", None),
        *(slice(-2, None), slice(None, None, -1), slice(None, None, 0), slice(None, "3"), slice(0.5, None)),
    ],
    ids=str,
)
def test_steps_that_are_none_are_refused(model: jf.Model, prompt: list[int], spelling: Any) -> None:
    def block(m: jf.Model, t: Any) -> None:
        for _ in t.iter[spelling]:
            pass

    with pytest.raises(jf.InvalidRequest, match=r"t\.iter\["):
        model.run(prompt, block, max_tokens=4)


def test_when_generation_ends_early_the_loop_ends_and_the_rest_runs(model: jf.Model, prompt: list[int]) -> None:
    plain = model.run(prompt, max_tokens=6, ignore_eos=True).token_ids
    kept = plain.index(plain[2]) + 1
    with model.trace(prompt, max_tokens=6, ignore_eos=True, stop_token_ids=[plain[2]]) as t:
        rows = list().save()
        for _ in t.iter[:]:
            rows.append(model.logits.argmax().item())
        after = len(rows)
        after.save()
    assert rows == t.result.token_ids == plain[:kept]
    assert after == kept


def test_a_bounded_loop_may_end_early_too(model: jf.Model, prompt: list[int]) -> None:
    with model.trace(prompt, max_tokens=2, ignore_eos=True) as t:
        seen = list().save()
        for step in t.iter[:5]:
            seen.append(step)
    assert seen == [0, 1]


def test_outside_a_loop_reads_are_of_step_0(model: jf.Model, prompt: list[int]) -> None:
    with model.trace(prompt, max_tokens=3, ignore_eos=True) as t:
        rows = model.layers[0].layer_output.shape[1]
        step = t.step
        t.save(rows=rows, step=step)
    assert t.result.saved == {"rows": len(prompt), "step": 0}


def test_after_a_loop_step_0_has_gone_by(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        for _ in t.iter[:2]:
            m.layers[0].layer_output.sum()
        m.layers[1].layer_output.sum()

    with pytest.raises(jf.OutOfOrder, match=r"layers\.1\.layer_output of step 0 has gone by"):
        model.run(prompt, block, max_tokens=3, ignore_eos=True)


def test_stop_ends_after_this_step(model: jf.Model, prompt: list[int]) -> None:
    plain = model.run(prompt, max_tokens=5, ignore_eos=True).token_ids
    with model.trace(prompt, max_tokens=5, ignore_eos=True) as t:
        seen = list().save()
        for step in t.iter[:]:
            seen.append(step)
            if step == 1:
                t.stop()
                row = model.logits[0].save()
    assert seen == [0, 1]
    assert t.result.finish_reason == "stopped"
    assert t.result.token_ids == plain[:2]
    assert row.argmax().item() == plain[1]


def test_stop_in_company_ends_its_own_request(model: jf.Model, prompts: list[list[int]]) -> None:
    with model.trace(max_tokens=3, ignore_eos=True) as t:
        with t.invoke(prompts[0]):
            t.stop()
        with t.invoke(prompts[1]):
            seen = [step for step in t.iter[:]]  # noqa: C416
            seen.save()
    assert [result.finish_reason for result in t.results] == ["stopped", "length"]
    assert [len(result.token_ids) for result in t.results] == [1, 3]
    assert seen == [0, 1, 2]


# -- steering positions: where an off-by-one hides


@pytest.mark.parametrize("mode", ["prompt", "last", "generated", "all"])
def test_steering_by_position_is_an_edit_of_those_rows(model: jf.Model, prompt: list[int], mode: str) -> None:
    """ "generated" starts at the last prompt token, which makes the first new one. Against edits at explicit rows."""
    vector = torch.linspace(-2.0, 3.0, model.hidden_size)
    last = len(prompt) - 1
    explicit = {
        "prompt": {0: list(range(len(prompt)))},
        "last": {0: [last]},
        "generated": {0: [last], 1: [0], 2: [0]},
        "all": {0: list(range(len(prompt))), 1: [0], 2: [0]},
    }[mode]

    def by_position(m: jf.Model, t: Any) -> None:
        streams = []
        for _ in t.iter[:]:
            at = t.positions
            chosen = {"prompt": at <= last, "last": at == last, "generated": at >= last, "all": at >= 0}[mode]
            m.layers[0].layer_output[:, chosen] += vector
            streams.append(m.layers[1].layer_output)
        t.save(streams=streams)

    def by_row(m: jf.Model, t: Any) -> None:
        streams = []
        for step in t.iter[:]:
            for row in explicit.get(step, []):
                m.layers[0].layer_output[:, row] += vector
            streams.append(m.layers[1].layer_output)
        t.save(streams=streams)

    one = model.run(prompt, by_position, max_tokens=3, ignore_eos=True)
    other = model.run(prompt, by_row, max_tokens=3, ignore_eos=True)
    assert one.token_ids == other.token_ids
    for left, right in zip(one.saved["streams"], other.saved["streams"], strict=True):
        assert left.equal(right)


@pytest.mark.parametrize("name", [value.name for value in jf.values() if value.access == "rw"])
def test_the_last_edit_of_a_step_lands(
    model: jf.Model, prompts: list[list[int]], editable: Callable[[str], None], name: str
) -> None:
    """Also where the loop has ended before it goes back to the model, and in a row that padding stands before."""
    editable(name)
    reason = model.support().get(name)
    if reason is not None:
        pytest.skip(reason)

    def edited(m: jf.Model, t: Any, *, edit: bool, read_on: bool) -> Any:
        for _ in t.iter[1]:
            if edit:
                value = getattr(m if hasattr(type(m), name) else m.layers[0], name)
                value *= -3  # of what makes the logits: another token
            if read_on:
                m.next_token_probabilities.sum()
        return next(m.logits for _ in t.iter[2])

    def run(**arguments: bool) -> list[torch.Tensor]:
        block = functools.partial(edited, **arguments)
        results = model.run(prompts, lambda m, t: block(m, t), max_tokens=3, ignore_eos=True)
        return [result.returned for result in results]

    last, followed, plain = run(edit=True, read_on=False), run(edit=True, read_on=True), run(edit=False, read_on=False)
    for one, other, without in zip(last, followed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(one, without, rtol=1e-3, atol=1e-3)


def test_a_loop_may_go_on_in_the_step_that_another_has_ended_in(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> list[tuple[int, Tensor]]:
        seen: list[tuple[int, Tensor]] = []
        for _ in t.iter[:2]:
            seen.append((t.step, m.layers[0].layer_output))
        for _ in t.iter[1:3]:
            seen.append((t.step, m.layers[1].layer_output))
        return seen

    def each(m: jf.Model, t: Any) -> list[tuple[int, Tensor]]:
        return [(t.step, layer.layer_output) for _ in t.iter[:3] for layer in m.layers[:2]]

    found = model.run(prompt, block, max_tokens=4, ignore_eos=True).returned
    first, second = (model.run(prompt, each, max_tokens=4, ignore_eos=True).returned[i::2] for i in (0, 1))
    assert [step for step, _ in found] == [0, 1, 1, 2]
    assert all(x.equal(y) for (_, x), (_, y) in zip(found, [*first[:2], *second[1:]], strict=True))


def test_a_loop_within_a_loop_leaves_the_outer_one_its_step(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> list[tuple[int, int, int]]:
        seen: list[tuple[int, int, int]] = []
        for step in t.iter[:3]:
            for inner in t.iter[step]:
                m.layers[0].layer_output.sum()
                seen.append((step, inner, t.step))
            rows = m.layers[1].layer_output.shape[1]
            seen.append((step, rows, t.step))
        return seen

    found = model.run(prompt, block, max_tokens=4, ignore_eos=True).returned
    assert found == [(0, 0, 0), (0, len(prompt), 0), (1, 1, 1), (1, 1, 1), (2, 2, 2), (2, 1, 2)]
