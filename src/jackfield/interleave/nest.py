"""Nests of tuples, lists and dicts with tensors in them, as modules take and return them."""

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in the nest."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in cast("tuple[Any, ...] | list[Any]", value):
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from tensors(item)


def private_copy(value: Any) -> Any:
    """The same nest with every tensor copied; other objects are passed on."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        items = [private_copy(item) for item in cast("tuple[Any, ...] | list[Any]", value)]
        made = cast("Any", type(value))  # pyright: ignore[reportUnknownArgumentType]
        return made(*items) if hasattr(cast("Any", value), "_fields") else made(items)  # a named tuple takes its fields
    if isinstance(value, dict):
        copies = {key: private_copy(item) for key, item in cast("dict[Any, Any]", value).items()}
        return copies if type(cast("Any", value)) is dict else type(cast("Any", value))(**copies)  # a ModelOutput
    return value
