"""The logit lens: what each layer's stream would say if the model ended there.

nostalgebraist, "interpreting GPT: the logit lens" (2020).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jackfield.errors import InvalidPlot
from jackfield.plots.arrays import Matrix, as_floats, as_labels
from jackfield.plots.canvas import FAINT, INK, colour_bar, heat_map, label_columns, label_rows, new_figure, write_title
from jackfield.plots.labels import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL_INCHES = (0.95, 0.26)
# Above this probability a cell is dark enough to need light text.
_DARK = 0.45


def logit_lens(
    tops: Sequence[Sequence[str]],
    probabilities: object,
    *,
    layers: Sequence[str] | None = None,
    tokens: Sequence[str] | None = None,
    title: str = "",
) -> "Figure":
    """A table of the top token at each layer and position, coloured by its probability, the last layer on top.

    Args:
        tops: the top tokens [layer token], strings.
        probabilities: of those tokens [layer token], a tensor or an array.
        layers: the label of each layer; without it, its number.
        tokens: the token read at each position.
        title: written above.

    Raises:
        InvalidPlot: another shape or number of labels, or values outside 0 to 1.
        MissingExtra: matplotlib is not installed.
    """
    values = as_floats(probabilities, "layer token", "probabilities")
    if not (values.min() >= 0 and values.max() <= 1.01):
        raise InvalidPlot("probabilities should be from 0 to 1.")
    num_layers, num_tokens = values.shape
    _check_grid(tops, num_layers, num_tokens)
    width, height = num_tokens * _CELL_INCHES[0], num_layers * _CELL_INCHES[1]
    figure = new_figure(width + 1.8, height + 1.4)
    axes = figure.add_subplot()
    image = heat_map(axes, values)
    axes.invert_yaxis()
    _write_tops(axes, tops, values)
    label_columns(axes, [visible(token) for token in as_labels(tokens, num_tokens, "tokens")], width)
    label_rows(axes, as_labels(layers, num_layers, "layers", "layer {}"), height)
    axes.set_xlabel("token read", color=FAINT)
    write_title(figure, title)
    colour_bar(figure, image, [axes], "probability of the top token")
    return figure


def _check_grid(tops: Sequence[Sequence[str]], num_layers: int, num_tokens: int) -> None:
    lengths = {len(row) for row in tops}
    if len(tops) != num_layers or lengths != {num_tokens}:
        found = f"{len(tops)} rows of {' or '.join(map(str, sorted(lengths))) or 'nothing'}"
        raise InvalidPlot(
            f"tops should be {num_layers} rows of {num_tokens} strings, as probabilities are, and is {found}."
        )


def _write_tops(axes: "Axes", tops: Sequence[Sequence[str]], values: Matrix) -> None:
    for layer, row in enumerate(tops):
        for place, token in enumerate(row):
            colour = "white" if values[layer, place] > _DARK else INK
            axes.text(
                place, layer, visible(token), color=colour, fontsize=8.5, ha="center", va="center", parse_math=False
            )
