"""Which rows of which steps a position means, against a plain reading of each form."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jackfield as jf
from jackfield.interleave.step import Rows
from jackfield.interventions.positions import WORDS, read_positions, select

ranges = st.builds(range, st.integers(0, 12), st.integers(13, 40), st.integers(1, 5))
several = st.lists(st.integers(0, 30) | ranges, min_size=1, max_size=4)
forms = st.sampled_from(WORDS) | st.integers(0, 30) | ranges | several


def is_meant(form: Any, position: int, prompt_length: int) -> bool:
    if isinstance(form, str):
        return {
            "all": True,
            "prompt": position < prompt_length,
            "last": position == prompt_length - 1,
            "generated": position >= prompt_length - 1,
        }[form]
    if isinstance(form, int):
        return position == form
    if isinstance(form, range):
        return position in list(form)
    return any(is_meant(each, position, prompt_length) for each in form)


@given(forms, st.integers(1, 12), st.integers(1, 12))
def test_the_rows_of_every_step(form: Any, prompt_length: int, max_tokens: int) -> None:
    end = prompt_length + max_tokens - 1
    selected = select(read_positions(form), prompt_length, end)
    for step in range(max_tokens):
        positions = Rows(0, 0, prompt_length).positions(step)
        expected = [row for row, position in enumerate(positions) if is_meant(form, position, prompt_length)]
        assert selected.within(positions) == expected


@given(forms, st.integers(1, 12), st.integers(1, 12), st.integers(1, 30))
def test_the_mask_of_so_many_keys(form: Any, prompt_length: int, max_tokens: int, length: int) -> None:
    length = min(length, prompt_length + max_tokens - 1)
    selected = select(read_positions(form), prompt_length, prompt_length + max_tokens - 1)
    expected = [is_meant(form, position, prompt_length) for position in range(length)]
    assert selected.mask(length, torch.device("cpu")).tolist() == expected
    if any(expected):
        assert selected.first == expected.index(True)


@given(forms)
def test_json_keeps_positions(form: Any) -> None:
    made = jf.Scale("logits", 1.0, positions=form)
    assert jf.from_json(made.to_json()).positions == made.positions == read_positions(form)


@given(several, st.integers(1, 4))
def test_a_run_touches_those_rows_alone(form: list[int | range], max_tokens: int) -> None:
    from tests.contract.conftest import subject

    model, prompt = subject("fake").model, [6, 20, 13, 28, 9]
    end = len(prompt) + max_tokens - 1
    form = [each for each in form if (each.start if isinstance(each, range) else each) < end]
    if not form:
        return
    site = "layers.0.mlp_output"
    edited = [jf.Replace(site, torch.full((model.hidden_size,), 7.0), positions=form), jf.Capture(site)]
    (result,) = model.generate(prompt, edited, max_tokens=max_tokens, ignore_eos=True)
    touched = (result.saved[site] == 7.0).all(-1).tolist()
    assert touched == [is_meant(form, position, len(prompt)) for position in range(end)]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("lats", r"'lats' is no word for positions; write .* Did you mean 'last'"),
        (-1, "position -1 counts from an end that moves; write an absolute position, or 'last'"),
        ([], "no position is given"),
        (True, "True is no position"),
        (1.0, "1.0 is no position"),
        (slice(3, 5), r"slice\(3, 5, None\) is no position"),
        (range(5, 2), r"range\(5, 2\) has no positions in ascending order"),
        (range(5, 2, -1), ".* has no positions in ascending order"),
        (range(-2, 4), ".* has no positions in ascending order from 0"),
        ([3, "last"], "'last' is no position"),
    ],
)
def test_what_is_no_position(form: Any, message: str) -> None:
    with pytest.raises(jf.InvalidIntervention, match=f"^Scale, positions: {message}"):
        jf.Scale("logits", 1.0, positions=form)
    with pytest.raises(jf.InvalidIntervention, match=f"^Knockout, keys: {message}"):
        jf.Knockout(0, keys=form)


def test_all_is_what_is_meant_without_any() -> None:
    assert jf.Scale("logits", 1.0, positions=None).positions == jf.Scale("logits", 1.0).positions == "all"
