"""Decoding from the cache: unequal prompts together are each alone, and sampling draws from what it says."""

import pytest
import torch
from torch import Tensor

from jackfield.engines.llama import layers
from jackfield.engines.llama.args import ModelArgs
from jackfield.engines.llama.decode import decode, left_pad, sample
from jackfield.engines.llama.layers import Transformer
from tests.engines.llama.native import LAYER, Recorder

PROMPTS = [[5, 9, 12, 40, 7, 33], [8, 3], [21, 50, 4]]
STEPS = 5


def heated() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=61, max_seq_len=24))
    for layer in model.layers:
        layer.attention.wq.weight.data.mul_(4)
    return model.requires_grad_(False)


def generated(model: Transformer, prompts: list[list[int]]) -> list[Tensor]:
    """The logits [batch, vocab] of each greedy step."""
    steps = decode(model, prompts)
    found = [next(steps)]
    while len(found) < STEPS:
        found.append(steps.send(sample(found[-1])))
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
        rows = stream.shape[1]
        return turns, layers.causal_mask(rows, start_pos + rows, stream.device)

    monkeypatch.setattr(Transformer, "_positions", visible)
    assert largest_difference(heated()) > 1e-2


@pytest.mark.parametrize("name", LAYER)
def test_every_value_of_a_padded_prompt_is_that_of_the_prompt(name: str) -> None:
    model, together, alone = heated(), Recorder((name,)), Recorder((name,))
    model.listen(together)
    next(decode(model, PROMPTS))
    model.listen(alone)
    next(decode(model, PROMPTS[2:]))
    got, want = together.values[name, 1][2:], alone.values[name, 1]
    for axis, size in enumerate(want.shape):
        got = got.narrow(axis, got.shape[axis] - size, size)  # padding is on the left of every axis that has any
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_padding_is_on_the_left() -> None:
    tokens, padding = left_pad([[7, 8, 9], [5]])
    assert tokens.tolist() == [[7, 8, 9], [0, 0, 5]]
    assert padding.tolist() == [0, 2]


LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0, -5.0]])


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"temperature": 0.0}, {1}),
        ({"temperature": 1e-4}, {1}),
        ({"temperature": 1.0, "top_k": 2}, {1, 2}),
        ({"temperature": 1.0, "top_k": 1}, {1}),
        ({"temperature": 1.0, "top_p": 0.64}, {1}),
        ({"temperature": 1.0, "top_p": 0.66}, {1, 2}),
        ({"temperature": 1.0, "top_p": 1e-6}, {1}),
        ({"temperature": 9.0}, {0, 1, 2, 3, 4}),
    ],
)
def test_what_can_be_drawn(options: dict[str, float], possible: set[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = sample(LOGITS.repeat(400, 1), generator=generator, **options)  # type: ignore[arg-type]
    assert set(drawn.tolist()) == possible


def test_a_seed_repeats_a_draw() -> None:
    first, second = (
        sample(LOGITS.repeat(50, 1), temperature=2.0, generator=torch.Generator().manual_seed(4)) for _ in range(2)
    )
    assert torch.equal(first, second)
