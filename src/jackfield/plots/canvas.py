"""An empty figure and what all our pictures share: the colours, the heat map, the labels of an axis."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jackfield.errors import MissingExtra
from jackfield.plots.arrays import Matrix
from jackfield.plots.labels import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#22262e"
FAINT = "#8a919e"
_WEAK, _MIDDLE, _STRONG = "#e9eff7", "#4f8fc9", "#0b2e5c"

LABEL_POINTS = 9.0
_TITLE_POINTS = 12.0
_INSTALL = "pip install matplotlib"


def new_figure(width_inches: float, height_inches: float) -> "Figure":
    """An empty figure that lays itself out. MissingExtra without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra(f"plots need matplotlib, which is missing. Install it with: {_INSTALL}") from None
    return Figure(figsize=(width_inches, height_inches), layout="constrained", facecolor="white")


def write_title(figure: "Figure", title: str) -> None:
    """Write `title` at the top left, in as many lines as the figure's width asks for; an empty one takes no room."""
    if title:
        letters = int(figure.get_figwidth() * 72 / (_TITLE_POINTS * 0.62))
        lines = textwrap.wrap(title, letters, max_lines=4, placeholder=" …")
        figure.suptitle(
            "\n".join(map(drawable, lines)), color=INK, fontsize=_TITLE_POINTS, x=0.01, ha="left", parse_math=False
        )


def heat_map(axes: "Axes", values: Matrix, largest: float = 1.0) -> Any:
    """Draw [row column] from 0 to `largest`, a square a cell; NaN is left white. The image, for a colour bar."""
    # matplotlib's images are typed by each backend: Any is what its own signatures say.
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("jackfield", [_WEAK, _MIDDLE, _STRONG])
    image = axes.imshow(values, cmap=colours, vmin=0.0, vmax=largest, interpolation="nearest", aspect="auto")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=INK, labelsize=LABEL_POINTS)
    return image


def colour_bar(figure: "Figure", image: Any, beside: "Sequence[Axes]", label: str) -> None:
    """A thin bar at the right of `beside`, saying what the colours mean."""
    bar = figure.colorbar(image, ax=list(beside), shrink=0.6, aspect=24, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, colors=INK, labelsize=LABEL_POINTS - 1)
    bar.set_label(label, color=INK, fontsize=LABEL_POINTS)


def label_columns(axes: "Axes", labels: Sequence[str], room_inches: float) -> None:
    """Write one label under each column, on end; every n-th where `room_inches` does not hold all."""
    places = _places(len(labels), room_inches)
    axes.set_xticks(places, [drawable(labels[place]) for place in places], rotation=90, parse_math=False)


def label_rows(axes: "Axes", labels: Sequence[str], room_inches: float) -> None:
    """Write one label before each row; every n-th where `room_inches` does not hold all."""
    places = _places(len(labels), room_inches)
    axes.set_yticks(places, [drawable(labels[place]) for place in places], parse_math=False)


def _places(count: int, room_inches: float) -> list[int]:
    lines = max(1, int(room_inches * 72 / (LABEL_POINTS * 1.15)))
    return list(range(0, count, max(1, -(-count // lines))))
