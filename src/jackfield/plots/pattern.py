"""Attention patterns: who looks at whom."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jackfield.errors import InvalidPlot
from jackfield.plots.arrays import Matrix, as_floats, as_labels
from jackfield.plots.canvas import (
    FAINT,
    INK,
    LABEL_POINTS,
    colour_bar,
    heat_map,
    label_columns,
    label_rows,
    new_figure,
    write_title,
)
from jackfield.plots.labels import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KEYS, _QUERIES = "key", "query"
_CELL_INCHES = 0.3
_SMALLEST_INCHES, _LARGEST_INCHES = 2.4, 12.0
_PANEL_INCHES, _LARGEST_PANEL_INCHES = 1.9, 3.6


def attention_pattern(pattern: object, tokens: Sequence[str] | None = None, *, title: str = "") -> "Figure":
    """One head's pattern as a picture: a row for each query, a column for each key.

    Args:
        pattern: probabilities [query key], a tensor or an array.
        tokens: the label of each key. With fewer queries than keys, as on a decode step, the queries are the last ones.
        title: written above.

    Raises:
        InvalidPlot: another shape or number of labels, or values outside 0 to 1.
        MissingExtra: matplotlib is not installed.
    """
    values = _probabilities(pattern, "query key", "pattern")
    labels = as_labels(tokens, values.shape[1], "tokens")
    width, height = _inches(values.shape[1]), _inches(values.shape[0])
    figure = new_figure(width + 2.0, height + 1.2)
    axes = figure.add_subplot()
    image = heat_map(axes, _unseen_left_out(values))
    _label(axes, labels, values.shape[0], (width, height))
    axes.set_xlabel(_KEYS, color=FAINT)
    axes.set_ylabel(_QUERIES, color=FAINT)
    write_title(figure, title)
    colour_bar(figure, image, [axes], "attention probability")
    return figure


def attention_heads(
    patterns: object, tokens: Sequence[str] | None = None, *, title: str = "", heads: Sequence[int] | None = None
) -> "Figure":
    """The patterns of many heads beside each other, on one scale of colours.

    Args:
        patterns: probabilities [head query key], a tensor or an array.
        tokens: the label of each key, written at the outer panels.
        title: written above all.
        heads: the number of each head; without it, from 0.

    Raises:
        InvalidPlot: another shape or number of labels, or values outside 0 to 1.
        MissingExtra: matplotlib is not installed.
    """
    values = _probabilities(patterns, "head query key", "patterns")
    labels = as_labels(tokens, values.shape[2], "tokens")
    names = as_labels(None if heads is None else [str(head) for head in heads], len(values), "heads")
    rows, columns = _grid(len(values))
    room = max(_PANEL_INCHES, min(_LARGEST_PANEL_INCHES, 0.15 * values.shape[2]))
    figure = new_figure(columns * room + 2.0, rows * room + 1.4)
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(len(values))]
    images = [heat_map(panel, _unseen_left_out(head)) for panel, head in zip(panels, values, strict=True)]
    for place, (panel, name) in enumerate(zip(panels, names, strict=True)):
        panel.set_title(f"head {name}", color=INK, fontsize=9, pad=4)
        last_of_column = place + columns >= len(panels)
        _label(panel, labels, values.shape[1], (room, room), keys=last_of_column, queries=place % columns == 0)
    figure.supxlabel(_KEYS, color=FAINT, fontsize=LABEL_POINTS)
    figure.supylabel(_QUERIES, color=FAINT, fontsize=LABEL_POINTS)
    write_title(figure, title)
    colour_bar(figure, images[0], panels, "attention probability")
    return figure


def _probabilities(given: object, axes: str, what: str) -> Matrix:
    values = as_floats(given, axes, what)
    queries, keys = values.shape[-2:]
    if queries > keys:
        raise InvalidPlot(
            f"{what} should be [{axes}] with a key for each query, and has {queries} queries, {keys} keys."
        )
    # Rounding may carry a probability of 1 a little past it.
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1.01):
        raise InvalidPlot(f"{what} should hold probabilities, from 0 to 1: give attention_probabilities, not scores.")
    return values


def _unseen_left_out(pattern: Matrix) -> Matrix:
    return np.where(pattern == 0, np.float32("nan"), pattern)


def _label(
    axes: "Axes",
    tokens: Sequence[str],
    num_queries: int,
    room_inches: tuple[float, float],
    *,
    keys: bool = True,
    queries: bool = True,
) -> None:
    width, height = room_inches
    shown = [visible(token) for token in tokens]
    label_columns(axes, shown if keys else [], width)
    label_rows(axes, shown[-num_queries:] if queries else [], height)


def _grid(panels: int) -> tuple[int, int]:
    columns = min(8, math.ceil(math.sqrt(panels)))
    return math.ceil(panels / columns), columns


def _inches(cells: int) -> float:
    return min(max(cells * _CELL_INCHES, _SMALLEST_INCHES), _LARGEST_INCHES)
