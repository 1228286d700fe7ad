"""Unequal prompts together in the cache are each as alone."""

import pytest
import torch
from torch import Tensor

from jackfield.engines.llama.layers import ModelArgs, Transformer
from tests.engines.llama.native import LAYER, Recorder

PROMPTS = [[5, 9, 12, 40, 7, 33], [8, 3], [21, 50, 4]]
STEPS = 5


def heated() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=61, max_seq_len=24))
    for layer in model.layers:
        layer.attention.wq.weight.data.mul_(4)
    return model.requires_grad_(False)


@torch.no_grad()
def generated(model: Transformer, prompts: list[list[int]], steps: int = STEPS) -> list[Tensor]:
    """The logits [batch, vocab] of each greedy step."""
    width = max(map(len, prompts))
    pads = [width - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)])
    found: list[Tensor] = []
    for step in range(steps):
        start_pos = width + step - 1 if step else 0
        found.append(model(tokens, start_pos, torch.tensor(pads) if any(pads) else None)[:, -1])
        tokens = found[-1].argmax(-1, keepdim=True)
    return found


def largest_difference(model: Transformer) -> float:
    """Between the prompts together and each alone."""
    together = torch.stack(generated(model, PROMPTS), 1)
    alone = torch.cat([torch.stack(generated(model, [prompt]), 1) for prompt in PROMPTS])
    return float((together - alone).abs().max())


def test_unequal_prompts_together_are_each_alone() -> None:
    assert largest_difference(heated()) < 1e-5


def test_a_visible_padding_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Transformer._positions

    def visible(self: Transformer, stream: Tensor, start_pos: int, padding: Tensor | None) -> tuple[Tensor, object]:
        turns, _ = right(self, stream, start_pos, padding)
        return turns, None if start_pos else "causal"

    monkeypatch.setattr(Transformer, "_positions", visible)
    assert largest_difference(heated()) > 1e-2


@pytest.mark.parametrize("name", LAYER)
def test_every_value_of_a_padded_prompt_is_that_of_the_prompt(name: str) -> None:
    model, together, alone = heated(), Recorder((name,)), Recorder((name,))
    model.listen(together)
    generated(model, PROMPTS, 1)
    model.listen(alone)
    generated(model, PROMPTS[2:], 1)
    got, want = together.values[name, 1][2:], alone.values[name, 1]
    for axis, size in enumerate(want.shape):
        got = got.narrow(axis, got.shape[axis] - size, size)  # padding is on the left of every axis that has any
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
