"""Gradients inside a block: of a number that was computed from what was read, for what was read.

In a trace with `gradients=True` a read is a node of the graph that the model goes on from, so a loss that is computed
from a later read depends on it.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from jackfield.errors import TracingError
from jackfield.trace.binding import keep


def in_graph(body: Callable[[], Any]) -> Callable[[], Any]:
    """`body`, with gradients on; what it returns is kept as saves are, without them."""

    def run() -> Any:
        with torch.enable_grad():
            return keep(body())

    return run


def gradient(loss: Any, values: Any) -> Any:
    """D `loss` / d each of `values`: a tensor for a tensor, a list for several, of their shapes, without a graph.

    The graph is kept, so that it can be asked again. TracingError for a loss that is not one number of the graph, and
    for a value that is not in the graph, or that the loss does not depend on.
    """
    several = not isinstance(values, Tensor)
    asked = list(cast("Sequence[Any]", values)) if several else [values]
    _check_loss(loss)
    if not asked:
        raise TracingError("t.gradient(loss, []) asks for the gradient of nothing: give reads.")
    for number, value in enumerate(asked):
        _check_value(_place(number, several), value)
    found = torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
    for number, each in enumerate(found):
        if cast("Tensor | None", each) is None:
            raise TracingError(
                f"The loss does not depend on {_place(number, several)}: the loss was read before it, or it was "
                "computed beside the model (a part of a read, a read-only value): give the read itself."
            )
    return list(found) if several else found[0]


def _place(number: int, several: bool) -> str:
    return f"values[{number}]" if several else "the value"


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TracingError(f"The loss is a {type(loss).__name__}; it has to be a tensor that was computed from reads.")
    if not loss.requires_grad:
        raise TracingError("The loss is not in the graph: compute it, with gradients on, from what the block has read.")
    if loss.numel() != 1:
        raise TracingError(f"The loss has shape {tuple(loss.shape)}; it has to be one number: take an entry, or a sum.")


def _check_value(place: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TracingError(f"{place} is a {type(value).__name__}; gradients are for tensors that the block has read.")
    if not value.requires_grad:
        raise TracingError(f"{place} is not in the graph: it is not a read of this trace, or it was read without one.")
