"""What a plot is given, made into numpy arrays of a known shape, or refused."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from jackfield.errors import InvalidPlot

Matrix = npt.NDArray[np.float32]


def as_floats(given: object, axes: str, what: str) -> Matrix:
    """`given` (a tensor, an array or nested lists) as float32, with one axis for each word of `axes`. A copy or a view.

    Leading axes of length 1 are dropped, so that what a block reads, [1, head, token, key], needs no index.

    Raises:
        InvalidPlot: another number of axes, or no numbers.
    """
    array = _as_array(given, what)
    expected = len(axes.split())
    while array.ndim > expected and array.shape[0] == 1:
        array = array[0]
    if array.ndim != expected or 0 in array.shape:
        raise InvalidPlot(f"{what} should be [{axes}], none of them empty, and has shape {list(array.shape)}.")
    return array


def as_labels(given: Sequence[str] | None, length: int, what: str, default: str = "{}") -> list[str]:
    """One label for each of `length` places; without labels, `default` with the number of the place.

    Raises:
        InvalidPlot: another number of labels.
    """
    if given is None:
        return [default.format(number) for number in range(length)]
    if isinstance(given, str) or len(given) != length:
        found = "one string" if isinstance(given, str) else f"{len(given)}"
        raise InvalidPlot(f"{what} should be a list of {length} strings, and is {found}.")
    return [str(label) for label in given]


def _as_array(given: object, what: str) -> Matrix:
    if isinstance(given, torch.Tensor):
        return given.detach().to(device="cpu", dtype=torch.float32).numpy()
    try:
        return np.asarray(cast(Any, given), dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidPlot(f"{what} should be a tensor or an array of numbers: {error}.") from None
