"""The logit lens: each cell says its own token, the last layer on top."""

import pytest
import torch

from jackfield.errors import InvalidPlot
from jackfield.plots import logit_lens

TOPS = [["a", " b", "$"], ["c", "\n", "e"]]
PROBABILITIES = torch.tensor([[0.1, 0.2, 0.9], [0.4, 0.5, 0.6]])


def test_cells_say_their_tokens_where_their_probabilities_are():
    axes, _ = logit_lens(TOPS, PROBABILITIES, tokens=["x", " y", "z"], title="all $").axes
    written = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "a", (1, 0): "␣b", (2, 0): "$", (0, 1): "c", (1, 1): "⏎", (2, 1): "e"}
    assert torch.equal(torch.tensor(axes.images[0].get_array().data), PROBABILITIES)


def test_last_layer_is_on_top():
    axes, _ = logit_lens(TOPS, PROBABILITIES).axes
    bottom, top = axes.get_ylim()
    assert bottom < top
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1"]


def test_dark_cells_have_light_text():
    axes, _ = logit_lens(TOPS, PROBABILITIES).axes
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert colours["$"] == "white"
    assert colours["a"] != "white"


@pytest.mark.parametrize(
    ("tops", "probabilities", "options", "text"),
    [
        ([["a"]], PROBABILITIES, {}, "2 rows of 3 strings, as probabilities are, and is 1 rows of 1"),
        ([["a"] * 3, ["b"] * 2], PROBABILITIES, {}, "2 rows of 2 or 3"),
        (TOPS, PROBABILITIES[0], {}, r"\[layer token\].*has shape \[3\]"),
        (TOPS, PROBABILITIES - 1, {}, "from 0 to 1"),
        (TOPS, PROBABILITIES, {"layers": ["0"]}, "layers should be a list of 2"),
        (TOPS, PROBABILITIES, {"tokens": ["0"]}, "tokens should be a list of 3"),
    ],
    ids=["rows", "ragged", "axes", "values", "layers", "tokens"],
)
def test_what_cannot_be_drawn_is_refused(tops, probabilities, options, text):
    with pytest.raises(InvalidPlot, match=text):
        logit_lens(tops, probabilities, **options)
