"""`model.arm`: making ready what blocks will ask for, which changes nothing of what they get."""

from typing import Any

import pytest

import jackfield as jf


def test_what_is_armed_can_be_read_and_edited_as_ever(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: object) -> float:
        m.layers[1].layer_output[:, -1] *= 2
        return float(m.logits.norm())

    before = model.run(prompt, block).returned
    model.arm()
    model.arm("layers.1.layer_output", "layers.*.mlp_output", "logits", "input_ids")
    assert model.run(prompt, block).returned == before


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("layers.0.layer_outptu", "Did you mean 'layer_output'"),
        ("layer_output", "say which"),
        ("layers.99.layer_output", "there is no layer 99"),
        (3, "3 is no site"),
    ],
)
def test_what_is_no_value_is_refused(model: jf.Model, site: str, message: str) -> None:
    with pytest.raises(jf.UnknownValue, match=message):
        model.arm("layers.0.layer_output", site)


@pytest.mark.parametrize(
    ("arm", "error", "message"),
    [
        ("layer_output", jf.UnknownValue, "say which"),
        (["layers.0.layer_output", None], jf.UnknownValue, "None is no site"),
        (3, jf.InvalidRequest, "arm=3: write one site"),
    ],
)
def test_nothing_is_loaded_for_an_arm_that_is_none(arm: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jf.Model("nowhere/nothing", arm=arm)


def test_a_block_arms_nothing(model: jf.Model, prompt: list[int]) -> None:
    with pytest.raises(jf.TracingError, match="A block cannot arm anything"):
        model.run(prompt, lambda m, t: m.arm("layers.0.layer_output"))


def test_what_is_not_available_says_why(model: jf.Model) -> None:
    reason = model.support(0)["router_logits"]
    assert reason
    with pytest.raises(jf.Unavailable, match=r"layers\.0\.router_logits is not available"):
        model.arm("layers.0.router_logits")
