"""Gradients, where an engine has them; where it has none, that is said before anything runs."""

from typing import Any

import pytest
import torch

import jackfield as jf


def loss_of(m: jf.Model) -> torch.Tensor:
    return (m.logits[0, 0] * torch.linspace(-1, 1, m.vocab_size)).sum()


def test_a_gradient_is_the_slope_of_the_loss(model: jf.Model, prompt: list[int]) -> None:
    """Along a direction, to what float32 shows of it; or the engine says why there is none."""

    def gradient(m: jf.Model, t: Any) -> Any:
        stream = m.layers[0].layer_output
        return t.gradient(loss_of(m), stream)

    try:
        found = model.run(prompt, gradient, gradients=True).returned
    except jf.Unavailable as error:
        assert "gradients=True is not available" in str(error)  # noqa: PT017 - one of two right answers
        return

    def moved(by: float) -> float:
        def block(m: jf.Model, t: Any) -> Any:
            m.layers[0].layer_output += by * found / found.norm()
            return loss_of(m).double()

        return float(model.run(prompt, block).returned)

    assert (moved(1e-2) - moved(-1e-2)) / 2e-2 == pytest.approx(float(found.norm()), rel=1e-2)


@pytest.fixture
def differentiable(model: jf.Model) -> jf.Model:
    reason = model._engine.no_gradients
    if reason is not None:
        pytest.skip(f"this engine has no gradients: {reason}")
    return model


def test_reading_with_gradients_changes_no_token(differentiable: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        for _ in t.iter[:]:
            _ = m.layers[0].attention_keys, m.layers[1].attention_scores, m.layers[1].layer_output

    options = {"max_tokens": 5, "ignore_eos": True}
    found = differentiable.run(prompt, block, gradients=True, **options)
    assert found.token_ids == differentiable.run(prompt, **options).token_ids


def test_several_prompts_have_graphs_of_their_own(differentiable: jf.Model, prompts: list[list[int]]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        stream = m.layers[0].layer_output
        return t.gradient(loss_of(m), stream)

    for prompt, result in zip(prompts, differentiable.run(prompts, block, gradients=True), strict=True):
        torch.testing.assert_close(result.returned, differentiable.run(prompt, block, gradients=True).returned)


def test_what_is_asked_for_in_vain(differentiable: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        return t.gradient(m.layers[0].layer_output.sum(), [])

    with pytest.raises(jf.TracingError, match="asks for the gradient of nothing"):
        differentiable.run(prompt, block, gradients=True)
    unsure: Any = "yes"
    with pytest.raises(jf.InvalidRequest, match="gradients='yes': write True or False"):
        differentiable.run(prompt, block, gradients=unsure)
