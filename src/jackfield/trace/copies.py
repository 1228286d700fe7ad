"""Private copies of what a block uses from outside: one copy per object, tensors moved to the model's device.

Parts of a model, modules, classes, functions, loaded models and tokenizers are not copied: they stay themselves.
What can be copied is what can be pickled, so that the same block also runs in another process.
"""

import functools
import io
import pickle
import weakref
from collections.abc import Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch

from jackfield.errors import TracingError
from jackfield.interleave.reference import Reference

_KEPT = (Reference, ModuleType, type, BuiltinFunctionType, FunctionType, CodeType, weakref.ref)
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_KEPT_FOREIGN = frozenset({"PreTrainedModel", "PreTrainedTokenizerBase"})  # of transformers, 4 and 5


class Outside(NamedTuple):
    """How a block comes by a value: a "global", a "cell", a "default", an "argument" or a "keyword", and its name."""

    kind: str
    name: str


def copy_outside(values: Mapping[Outside, Any], device: torch.device | str | None) -> dict[Outside, Any]:
    """A copy of every value; what was one object under two names, or in two containers, is one object again.

    Tensors are detached copies on `device` (None: where they are), in their own dtype; leaves that ask for gradients
    go on asking. Raises TracingError, with its name, for a value that cannot be copied.
    """
    if all(_stays(cast("type[Any]", type(value))) for value in values.values()):
        return dict(values)
    try:
        return _copied(dict(values), device)
    except Exception:
        for place, value in values.items():
            _check(place.name, value, device)
        raise


def _check(name: str, value: Any, device: torch.device | str | None) -> None:
    try:
        _copied(value, device)
    except Exception as error:
        raise TracingError(
            f"The block uses {name!r} from outside, and gets a copy of it; but this {type(value).__name__} cannot be "
            f"copied ({error}). Make it inside the block, or pass the block the plain data that it needs from it."
        ) from error


def _copied(value: Any, device: torch.device | str | None) -> Any:
    buffer = io.BytesIO()
    writer = _Writer(buffer, device)
    writer.dump(value)
    buffer.seek(0)
    return _Reader(buffer, writer.passed).load()


class _Writer(pickle.Pickler):
    """Pickles what is plain, and passes the rest by hand: tensors as their copies, parts of a model as themselves."""

    def __init__(self, buffer: io.BytesIO, device: torch.device | str | None) -> None:
        super().__init__(buffer, protocol=5)
        self.passed: list[Any] = []
        self._device = device
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        is_tensor = isinstance(obj, torch.Tensor)
        if not is_tensor and not _is_kept(cast("type[Any]", type(obj))):
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.passed)
            self.passed.append(_copied_tensor(obj, self._device) if is_tensor else obj)
        return self._index[id(obj)]


@functools.lru_cache(maxsize=1024)
def _is_kept(kind: type) -> bool:
    foreign = any(
        base.__name__ in _KEPT_FOREIGN and base.__module__.startswith("transformers.") for base in kind.__mro__
    )
    return foreign or issubclass(kind, _KEPT)


def _stays(kind: type) -> bool:
    """Whether an object of this kind is its own copy."""
    return kind in _PLAIN or _is_kept(kind)


class _Reader(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, passed: list[Any]) -> None:
        super().__init__(buffer)
        self._passed = passed

    def persistent_load(self, pid: int) -> Any:
        return self._passed[pid]


def _copied_tensor(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    copied = tensor.detach().to(tensor.device if device is None else device, copy=True)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)
