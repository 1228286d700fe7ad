"""Values out of a block into the caller's names, and what is kept of them on the way."""

import copy
import ctypes
import dataclasses
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, cast

import torch

from jackfield.interleave.reference import Reference


def visible_names(frame: FrameType) -> dict[str, Any]:
    """Every name that code in `frame` can see, except builtins."""
    seen = {**frame.f_globals, **frame.f_locals} if not _is_function(frame) else dict(frame.f_globals)
    if _is_function(frame):
        for name in _variables(frame):
            seen.pop(name, None)  # a variable without a value hides the global of its name
        seen.update(frame.f_locals)
        _forget(frame)
    return seen


def bind(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Assigns each value to its name, as an assignment in `frame` would: a local, an outer variable or a global."""
    variables = _variables(frame) if _is_function(frame) else frozenset[str]()
    own = {name: value for name, value in values.items() if name in variables}
    if _is_function(frame):
        frame.f_globals.update({name: value for name, value in values.items() if name not in variables})
    else:
        frame.f_locals.update(values)
    if own:
        frame.f_locals.update(own)
        _write_back(frame)


def keep(value: Any) -> Any:
    """What a save keeps of `value`: tensors without gradients, on the CPU, in their own dtype.

    Goes through lists, tuples, dicts, sets and dataclasses, which are made anew; any other object stays as it is. A
    tensor is copied where it is elsewhere, or is a part of a larger one; the same tensor twice is one tensor again.
    """
    return _kept(value, {})


def _is_function(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _variables(frame: FrameType) -> frozenset[str]:
    code = frame.f_code
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))


def _write_back(frame: FrameType) -> None:
    """Before Python 3.13 a function's `f_locals` is a copy of its variables, to be written back by hand (PEP 667)."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        _forget(frame)


def _forget(frame: FrameType) -> None:
    """That copy lives as long as its frame does, and would keep every tensor in it alive."""
    if sys.version_info < (3, 13):
        frame.f_locals.clear()


def _kept(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) is torch.Tensor and _is_plain(value):
        return value
    identity = id(value)
    if identity in memo:
        return memo[identity]
    if isinstance(value, torch.Tensor):
        memo[identity] = _kept_tensor(value)
    elif isinstance(value, list | dict):
        _kept_container(cast("list[Any] | dict[Any, Any]", value), memo)
    elif isinstance(value, tuple | set | frozenset):
        memo[identity] = _kept_fixed(cast("tuple[Any, ...]", value), memo)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | Reference):
        _kept_dataclass(value, memo)
    return memo.get(identity, value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is kept as it is."""
    return tensor.is_cpu and not tensor.requires_grad and not tensor.is_inference() and not _is_part(tensor)


def _kept_tensor(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        kept = tensor.detach().to("cpu")
        return kept.clone() if _is_part(kept) or kept.is_inference() else kept


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether its memory holds more than it."""
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def _kept_dataclass(value: Any, memo: dict[int, Any]) -> None:
    made = memo[id(value)] = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, _kept(getattr(value, field.name), memo))  # frozen ones too


def _kept_container(value: list[Any] | dict[Any, Any], memo: dict[int, Any]) -> None:
    """A list or dict, also of a class of its own, such as an OrderedDict. May hold itself."""
    made: Any = copy.copy(value)
    memo[id(value)] = made
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        made[key] = _kept(item, memo)


def _kept_fixed(value: Any, memo: dict[int, Any]) -> Any:
    items = [_kept(item, memo) for item in value]
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    return value._make(items) if hasattr(value, "_make") else type(value)(items)  # `_make`: a namedtuple
