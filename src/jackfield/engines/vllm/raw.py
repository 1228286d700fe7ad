"""Raw places: any submodule's arguments and results, by vLLM's own module names, in one step that runs uncompiled.

Gates stand at every module while such a step runs, and are gone after it. A request's part of a tensor is its rows;
what has no rows, a rotary table or a flag, is everybody's, and can be read only.
"""

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from torch import Tensor, nn

from jackfield.engines.vllm.raw_parts import RawJoint
from jackfield.engines.vllm.taps import NOW, named
from jackfield.errors import EditMismatch
from jackfield.interleave.channel import Channel, Selection
from jackfield.interleave.nest import private_copy
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Worker

if TYPE_CHECKING:
    from jackfield.engines.vllm.forward_pass import ForwardPass
    from jackfield.engines.vllm.host import Host

RAW: Final = "raw"


@dataclass(slots=True)
class RawPassing:
    """A module's call: `(args, kwargs)`, or its result, whole; `rows` are the request's, of `total` in the batch."""

    nest: Any
    signature: inspect.Signature | None
    rows: slice
    total: int


class Gates:
    """The gates of a model's modules."""

    def __init__(self, root: nn.Module, host: "Host") -> None:
        self._root, self._host = root, host

    @contextmanager
    def put_up(self, wanted: bool) -> Generator[None]:
        """While it is open, every module tells of its calls, if that is wanted."""
        gated = list(named(self._root).items()) if wanted else []
        plain = [(module, vars(module).get("forward")) for _, module in gated]
        try:
            for path, module in gated:
                self._gate(path, module)
            yield
        finally:
            for module, forward in reversed(plain):
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward

    def _gate(self, path: str, module: nn.Module) -> None:
        forward, signature = module.forward, inspect.signature(module.forward)
        entering, leaving = (self._host.slots[Site(path, port, RAW)] for port in (Port.INPUT, Port.OUTPUT))

        def gated(*args: Any, **kwargs: Any) -> Any:
            now = cast("ForwardPass | None", NOW.get())
            if now is None:
                return forward(*args, **kwargs)
            now.meet_raw(entering, (args, kwargs), signature)
            result = forward(*args, **kwargs)
            now.meet_raw(leaving, result, None)
            return result

        module.forward = gated


class RawChannel(Channel):
    """A module's `.input` (its first argument), `.inputs` or `.output`: the request's rows of every tensor in it."""

    def __init__(self, path: str, port: str, joint: RawJoint) -> None:
        self.joint = joint
        self.name = self.memory = f"{path or '(root)'}.{port}"
        self.port, self.writable = port, True
        self.site = Site(path, Port.OUTPUT if port == "output" else Port.INPUT, RAW)

    def read(self, passing: RawPassing, worker: Worker, selection: Selection) -> Any:
        return private_copy(_cut(self._found(passing), passing, lambda rows: self.joint.join(rows, self.name)))

    def write(self, passing: RawPassing, worker: Worker, selection: Selection, value: Any) -> None:
        for place, new in _pairs(self._found(passing), value, self.name):
            if isinstance(place, Tensor) and _has_rows(place, passing):
                _rows(place, passing).copy_(self.joint.cut(new, place.shape[-1]))
            elif not _same(place, new):
                raise EditMismatch(f"{self.name}: a part of it that is no tensor of this request's rows was changed.")

    def check(self, wanted: Any, value: Any) -> None:
        """Refuses a nest of another form; the tensors in it are held against their own places."""
        for place, new in _pairs(wanted, value, self.name):
            if isinstance(place, Tensor):
                super().check(place, new)

    def _found(self, passing: RawPassing) -> Any:
        if self.port != "input":
            return passing.nest
        args, kwargs = passing.nest
        if args:
            return args[0]
        first = next(iter(passing.signature.parameters)) if passing.signature is not None else None
        return kwargs.get(first)


def _has_rows(tensor: Tensor, passing: RawPassing) -> bool:
    return tensor.ndim > 0 and passing.total in tensor.shape[:2] and (tensor.shape[0] in (1, passing.total))


def _rows(tensor: Tensor, passing: RawPassing) -> Tensor:
    """The request's rows of a tensor that has rows, as a view."""
    return tensor[passing.rows] if tensor.shape[0] == passing.total else tensor[:, passing.rows]


def _cut(value: Any, passing: RawPassing, join: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with the request's rows of every tensor that has rows, of all ranks."""
    if isinstance(value, Tensor):
        return join(_rows(value, passing)) if _has_rows(value, passing) else value
    if isinstance(value, tuple | list):
        items = [_cut(item, passing, join) for item in cast("tuple[Any, ...] | list[Any]", value)]
        made = cast("Any", type(value))  # pyright: ignore[reportUnknownArgumentType]
        return made(*items) if hasattr(cast("Any", value), "_fields") else made(items)
    if isinstance(value, dict):
        return {key: _cut(item, passing, join) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _pairs(old: Any, new: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """The leaves of two nests of one form, side by side; EditMismatch where they differ in it."""
    if isinstance(old, tuple | list | dict):
        keys, others = _keys(old), _keys(new)
        if type(new) is not type(cast("Any", old)) or others != keys:
            raise EditMismatch(f"{name} was assigned something of another form than what passes there.")
        for key in keys:
            yield from _pairs(cast("Any", old)[key], new[key], name)
    else:
        yield old, new


def _keys(nest: Any) -> list[Any]:
    """What the items of a tuple, a list or a dict are found by; of anything else, nothing."""
    if isinstance(nest, dict):
        return list(cast("dict[Any, Any]", nest))
    return list(range(len(cast("Sequence[Any]", nest)))) if isinstance(nest, tuple | list) else []


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return (
            isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and bool((old == new).all())
        )
    return old is new or old == new
