"""`model.arm`: making ready what blocks will ask for, which changes nothing of what they get."""

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


def test_what_is_not_available_says_why(model: jf.Model) -> None:
    reason = model.support(0)["router_logits"]
    assert reason
    with pytest.raises(jf.Unavailable, match="router_logits is not available"):
        model.arm("layers.0.router_logits")
