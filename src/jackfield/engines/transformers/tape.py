"""What a module does with one tensor, and with all that comes of it, so that it can be done again with another.

A tape follows tensors by identity, holding them weakly: it keeps none of the module's intermediate results alive. It
does keep the other arguments of the calls (masks, biases), until it is dropped.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

# The arguments and results of torch's functions are of any type.
Function = Callable[..., Any]

_WRITING_OPERATORS = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)
_MOVING = frozenset({"permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "__get__"})


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands, in a recorded call, for one of the tensors that came of the source."""

    number: int


@dataclass(frozen=True, slots=True)
class _Call:
    function: Function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: tuple[int, ...]


class Tape:
    """The calls that followed from `source`, in order. `unfaithful` says why playing them again would not be right."""

    def __init__(self, source: Tensor) -> None:
        self.unfaithful: str | None = None
        self._writes = False  # whether any call changes a tensor in place
        self._places: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._calls: list[_Call] = []
        self._count = 0
        self._place_of(source)

    def place(self, tensor: Tensor) -> int | None:
        """The place of a tensor that came of the source; None for any other. The source's is 0."""
        known = self._places.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def known_place(self, tensor: Tensor) -> int:
        """The place of a tensor that is known to have come of the source."""
        place = self.place(tensor)
        assert place is not None
        return place

    def record(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Keeps a call that was just made, at least one of whose arguments came of the source."""
        written = written_by(function, args, kwargs)
        results = [written] if written is not None else list(tensors_in(result))
        if not results:
            return  # a shape, a dtype
        self._judge(function, written)
        places = tuple(self._place_of(tensor) for tensor in results)
        self._calls.append(_Call(function, self._with_places(args), self._with_places(kwargs), places))

    def play(self, source: Tensor, wanted: Tensor) -> Tensor:
        """What `wanted` would have been, had the source been `source`, which is not changed."""
        return self.play_to(source, self.known_place(wanted))

    def play_to(self, source: Tensor, place: int) -> Tensor:
        """The same for a tensor that may be gone, by its place."""
        tensors = {0: source.clone() if self._writes else source}
        for call in self._calls:
            result = call.function(*_with_tensors(call.args, tensors), **_with_tensors(call.kwargs, tensors))
            tensors.update(zip(call.results, tensors_in(result), strict=False))  # `x[...] = y` gives nothing back
        return tensors[place]

    def _place_of(self, tensor: Tensor) -> int:
        place = self.place(tensor)
        if place is None:
            place, self._count = self._count, self._count + 1
            self._places[id(tensor)] = (weakref.ref(tensor), place)
        return place

    def _judge(self, function: Function, written: Tensor | None) -> None:
        self._writes |= written is not None
        if written is not None and self.place(written) is None:
            self.unfaithful = "it writes its scores into a buffer that already exists"
        if function.__name__ in _MOVING:
            self.unfaithful = "it moves the axes of its scores about"

    def _with_places(self, tree: Any) -> Any:
        def place(item: Any) -> Any:
            place = self.place(item) if isinstance(item, Tensor) else None
            return item if place is None else _Place(place)

        return _mapped(tree, place)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in cast(Sequence[Any], tree):
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(tuple(cast(dict[str, Any], tree).values()))


def written_by(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a call changes in place, by torch's naming: `add_`, `x[...] = y`, `out=`, `inplace=True`."""
    name = function.__name__
    if kwargs.get("out") is not None:
        target = kwargs["out"]
    elif name in _WRITING_OPERATORS or kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__")):
        target = args[0] if args else None
    else:
        target = None
    return target if isinstance(target, Tensor) else None


def _with_tensors(tree: Any, tensors: Mapping[int, Tensor]) -> Any:
    return _mapped(tree, lambda item: tensors[item.number] if isinstance(item, _Place) else item)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    if type(tree) is tuple:  # not torch.Size, and not a named tuple: they hold no tensors, or are made otherwise
        return tuple(_mapped(item, change) for item in cast(tuple[Any, ...], tree))
    if isinstance(tree, list):
        return [_mapped(item, change) for item in cast(list[Any], tree)]
    if isinstance(tree, dict):
        return {key: _mapped(item, change) for key, item in cast(dict[str, Any], tree).items()}
    return change(tree)
