"""Two values that are of the same numbers: what a block changes in one copy, the other does not undo in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf

PAIRS = (
    ("attention_keys", "attention_cached_keys"),
    ("attention_values", "attention_cached_values"),
    ("attention_head_outputs", "attention_premix"),
    ("mlp_output", "layer_output"),
)


def logits(model: jf.Model, prompt: list[int], edit: Callable[[Any], None]) -> Tensor:
    def block(m: jf.Model, t: Any) -> Tensor:
        edit(m.layers[1])
        return m.logits

    return model.run(prompt, block).returned


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("order", [1, -1])
def test_copies_that_are_both_changed_are_refused_or_both_seen(
    model: jf.Model, prompt: list[int], pair: tuple[str, str], order: int, editable: Callable[[str], None]
) -> None:
    """Kills: the copy that is written back last, over what was changed in the other."""
    for name in pair:
        editable(name)
    first, second = pair

    def one_after_the_other(layer: Any) -> None:
        getattr(layer, first)[:, :1] += 1
        getattr(layer, second)[:, -1:] += 2

    def both(layer: Any) -> None:
        one, two = (getattr(layer, name) for name in pair)
        for tensor, place, step in ((one, slice(1), 1), (two, slice(-1, None), 2))[::order]:
            tensor[:, place] += step

    try:
        found = logits(model, prompt, both)
    except (jf.EditMismatch, jf.OutOfOrder):
        return
    torch.testing.assert_close(found, logits(model, prompt, one_after_the_other))


def test_rows_apart_are_both_changed_and_rows_in_common_are_refused(model: jf.Model, prompt: list[int]) -> None:
    def apart(layer: Any) -> None:
        one, two = (layer.read("layer_output", queries=[row]) for row in (0, 1))
        one += 1
        two *= 2

    def together(layer: Any) -> None:
        layer.layer_output[:, 0] += 1
        layer.layer_output[:, 1] *= 2

    def in_common(layer: Any) -> None:
        one, whole = layer.read("layer_output", queries=[0]), layer.layer_output
        one += 1
        whole *= 2

    torch.testing.assert_close(logits(model, prompt, apart), logits(model, prompt, together))
    with pytest.raises(jf.EditMismatch, match=r"layers\.1\.layer_output: two copies of the same numbers"):
        logits(model, prompt, in_common)


def test_a_copy_that_is_out_of_date_is_read_anew(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> tuple[Tensor, Tensor]:
        layer = m.layers[1]
        whole, row = layer.attention_premix, layer.read("attention_premix", queries=[0])
        whole += 1
        return row + 1, layer.read("attention_premix", queries=[0])

    expected, again = model.run(prompt, block).returned
    torch.testing.assert_close(again, expected)
