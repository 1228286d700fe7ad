"""Pictures of attention patterns: what is drawn is what was given, and what cannot be drawn is refused."""

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from jackfield.errors import InvalidPlot
from jackfield.plots import attention_heads, attention_pattern

TOKENS = ["The", " cost", " is", " $", "5"]


def causal(*lead: int, size: int = 5) -> torch.Tensor:
    return torch.randn(*lead, size, size, generator=torch.Generator().manual_seed(0)).tril().abs().softmax(-1).tril()


def draw(figure: Figure) -> bytes:
    kept = io.BytesIO()
    figure.savefig(kept, format="png")
    return kept.getvalue()


def test_pattern_draws_the_values_given():
    pattern = causal()
    figure = attention_pattern(pattern, TOKENS, title="layer 3")
    axes, _ = figure.axes
    drawn = axes.images[0].get_array()
    np.testing.assert_array_equal(drawn.filled(0), pattern.numpy())
    assert figure.get_suptitle() == "layer 3"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["The", "␣cost", "␣is", "␣$", "5"]


def test_keys_that_cannot_be_seen_are_left_white():
    axes, _ = attention_pattern(causal()).axes
    np.testing.assert_array_equal(axes.images[0].get_array().mask, ~np.tri(5, dtype=bool))


def test_rows_of_a_decode_step_are_the_last_tokens():
    axes, _ = attention_pattern(causal()[-2:], TOKENS).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["␣$", "5"]


@pytest.mark.parametrize(
    "pattern",
    [
        causal().bfloat16(),
        causal().requires_grad_(),
        causal()[None, None],
        causal().double().numpy(),
        causal().tolist(),
    ],
    ids=["bfloat16", "with gradients", "as read in a block", "numpy", "lists"],
)
def test_pattern_takes(pattern):
    assert draw(attention_pattern(pattern, TOKENS)).startswith(b"\x89PNG")


def test_heads_have_a_panel_each_with_its_number():
    patterns = causal(9)
    *panels, _ = attention_heads(patterns, TOKENS, heads=range(10, 19)).axes
    assert [panel.get_title() for panel in panels] == [f"head {number}" for number in range(10, 19)]
    for panel, pattern in zip(panels, patterns, strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array().filled(0), pattern.numpy())


@pytest.mark.parametrize("heads", [1, 2, 5, 12])
def test_tokens_are_labelled_once_a_row_and_once_a_column(heads):
    *panels, _ = attention_heads(causal(heads), TOKENS).axes
    columns = sum(panel.get_subplotspec().rowspan.start == 0 for panel in panels)
    assert sum(len(panel.get_xticks()) > 0 for panel in panels) == columns
    assert sum(len(panel.get_yticks()) > 0 for panel in panels) == -(-heads // columns)


def test_both_pictures_say_which_axis_is_which():
    axes, _ = attention_pattern(causal(), TOKENS).axes
    figure = attention_heads(causal(4), TOKENS)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("key", "query")


def test_labels_of_a_long_prompt_do_not_overlap():
    axes, _ = attention_pattern(causal(size=300), [f"word{n}" for n in range(300)]).axes
    places = list(axes.get_xticks())
    assert 20 < len(places) < 100
    assert axes.get_xticklabels()[1].get_text() == f"word{int(places[1])}"


@pytest.mark.parametrize("token", ["$x^{$", "\\alpha", "中文", "\U0001f600", "\n", "\x00", "a" * 99, ""])
def test_any_token_can_be_drawn(token):
    # A glyph that the font lacks would be a warning, which is an error here.
    draw(attention_pattern(causal(), [token] * 5, title=token))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: attention_pattern(causal(3)), r"pattern should be \[query key\].*has shape \[3, 5, 5\]"),
        (lambda: attention_heads(causal()), r"patterns should be \[head query key\].*has shape \[5, 5\]"),
        (lambda: attention_heads(torch.zeros(0, 5, 5)), "none of them empty"),
        (lambda: attention_pattern(causal(), ["one"]), "a list of 5 strings, and is 1"),
        (lambda: attention_pattern(causal(), "abcde"), "a list of 5 strings, and is one string"),
        (lambda: attention_heads(causal(2), heads=[1]), "heads should be a list of 2"),
        (lambda: attention_pattern(causal().log()), "attention_probabilities, not scores"),
        (lambda: attention_pattern(causal() * 3), "from 0 to 1"),
        (lambda: attention_pattern(causal()[:, :3]), "5 queries, 3 keys"),
        (lambda: attention_pattern("picture"), "tensor or an array of numbers"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_cannot_be_drawn_is_refused(call, text):
    with pytest.raises(InvalidPlot, match=text):
        call()
