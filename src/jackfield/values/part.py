"""A part of a model: what a name belongs to. It asks its engine where a value is, and the block's worker for it."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, cast, runtime_checkable

from torch import Tensor, nn

from jackfield.errors import EditMismatch, TracingError, UnknownValue
from jackfield.interleave.channel import Channel, Selection
from jackfield.interleave.reference import Bound
from jackfield.interleave.worker import Worker
from jackfield.values.anatomy import AttentionAnatomy
from jackfield.values.synonyms import suggestion
from jackfield.values.value import Value, num_heads

Picks = int | slice | Sequence[int] | None


@runtime_checkable  # beartype, in tests, asks isinstance
class Server(Protocol):
    """What the parts of a model ask of its engine."""

    def channel(self, name: str, layer: int | None, call: int | None) -> Channel: ...
    def raw_channel(self, path: str, port: str) -> Channel: ...
    def step_value(self, name: str, worker: Worker) -> Any: ...
    def attention(self, layer: int) -> AttentionAnatomy: ...
    def sinks(self, layer: int) -> Tensor | None: ...
    def alibi_slopes(self, layer: int) -> Tensor | None: ...
    def module(self, path: str) -> nn.Module: ...
    def part(self, path: str) -> "Part": ...
    def layer_part(self, layer: int) -> "Part": ...
    def sublayer_path(self, layer: int, which: str) -> str: ...
    def support(self, layer: int | None) -> Mapping[str, str | None]: ...


class _Channels(dict[str, Channel]):
    """Where the values of a part are, each asked for once."""

    __slots__ = ("_place", "_server")

    def __init__(self, server: Server, *place: int | None) -> None:
        self._server, self._place = server, place

    def __missing__(self, name: str) -> Channel:
        channel = self[name] = self._server.channel(name, *self._place)
        return channel


class Part(Bound):
    """Base of the model, its layers, their attention and MLP, and raw modules."""

    __slots__ = ("_call", "_channels", "_layer", "_path", "_server")

    _server: Server
    _path: str
    _layer: int | None
    _call: int | None
    _channels: "_Channels"

    def __init__(self, server: Server, path: str, layer: int | None = None, call: int | None = None) -> None:
        own = {"_server": server, "_path": path, "_layer": layer, "_call": call}
        for name, item in {**own, "_channels": _Channels(server, layer, call)}.items():
            object.__setattr__(self, name, item)

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(getattr(type(self), name, None), "__set__"):
            raise UnknownValue(f"{self!r} has no value {name!r} to assign.{suggestion(name, value_names(type(self)))}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<{' '.join(filter(None, (type(self).__name__, self._path)))}>"

    def read_value(self, value: Value, selection: Selection) -> Any:
        """The value in the running block's step."""
        worker = self._worker(value.name)
        if value.each_step:
            worker.await_step()
            return worker.show(value.name, self._server.step_value(value.name, worker))
        return worker.read(self._channels[value.name], selection)

    def write_value(self, value: Value, new: Any, selection: Selection) -> None:
        """Writes `new` in the place of the value."""
        if value.access == "r":
            raise EditMismatch(f"{value.name} can be read only.")
        self._worker(value.name).write(self._channels[value.name], new, selection)

    def _worker(self, name: str) -> Worker:
        worker = Worker.current()
        if worker is None:
            raise TracingError(
                f"{name} has a value only while the model runs: read it inside `with model.trace(prompt) as t:`."
            )
        if worker.owner is not self._server:
            raise TracingError(f"{name} belongs to another model than the one this block runs beside.")
        return worker


class ValuePart(Part):
    """A part that carries named values, whole or by rows and heads."""

    __slots__ = ()

    def read(self, name: str, *, heads: Picks = None, queries: Picks = None) -> Any:
        """The rows `queries` and the heads `heads` of a value, computing those alone.

        Both take an int, a slice or ints, and keep their axis: `read("attention_probabilities", heads=[3],
        queries=[-1])` is [1, 1, 1, k]. `queries` counts this step's tokens. UnknownValue: no such name, head or token.
        """
        value = self._value(name)
        return self.read_value(value, self._selection(value, heads, queries))

    def write(self, name: str, new: Tensor, *, heads: Picks = None, queries: Picks = None) -> None:
        """Writes `new`, of the shape that `read` with the same arguments gives. EditMismatch where it is not."""
        value = self._value(name)
        self.write_value(value, new, self._selection(value, heads, queries))

    def support(self) -> Mapping[str, str | None]:
        """For each name, None (available) or the reason it is not, on this layer."""
        return self._server.support(self._layer)

    def _value(self, name: str) -> Value:
        value = getattr(type(self), name, None)
        if not isinstance(value, Value):
            raise UnknownValue(f"{self!r} has no value {name!r}.{suggestion(name, value_names(type(self)))}")
        return value

    def _selection(self, value: Value, heads: Picks, tokens: Picks) -> Selection:
        worker = self._worker(value.name)
        picked: dict[str, tuple[int, ...] | None] = {"heads": None, "tokens": None}
        if heads is not None:
            if value.head_axis is None or self._layer is None:
                raise UnknownValue(f"{value.name} has no head axis: its axes are [{value.axes}].")
            picked["heads"] = _picked("head", heads, num_heads(value, self._server.attention(self._layer)))
        if tokens is not None:
            if value.token_axis is None:
                raise UnknownValue(f"{value.name} has no token axis: its axes are [{value.axes}].")
            picked["tokens"] = _picked("token", tokens, worker.rows.num_tokens(worker.step))
        return Selection(**picked)


def value_names(owner: type) -> list[str]:
    """Every value that a class of parts answers for, its bases' included."""
    return [name for base in owner.__mro__ for name, item in vars(base).items() if isinstance(item, Value)]


def _picked(what: str, picks: int | slice | Sequence[int], size: int) -> tuple[int, ...]:
    listed = picks if isinstance(picks, Iterable) else [picks]
    indices = range(size)[picks] if isinstance(picks, slice) else listed
    chosen = tuple(numbered(what, index, size) for index in cast("Iterable[object]", indices))
    if not chosen or len(set(chosen)) != len(chosen):
        raise UnknownValue(f"{what}s {list(chosen)} were asked for; name at least one, and each once.")
    return chosen


def numbered(what: str, index: object, size: int) -> int:
    """An index from the front, of any integer type; UnknownValue where there is no such thing."""
    if type(index) is int and 0 <= index < size:  # nearly all are that
        return index
    try:
        number = operator.index(cast("SupportsIndex", index))
    except TypeError:
        number = size
    if isinstance(index, bool) or not -size <= number < size:
        raise UnknownValue(f"There is no {what} {index!r} here: {what}s are 0 to {size - 1}.")
    return number % size
