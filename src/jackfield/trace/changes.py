"""A change of an outside object would be lost, since a block has copies: it is refused when the block is captured.

Parts of a model are no copies, and may be changed. What an expression stands for is looked up without running
anything of the user's: no properties, no calls.
"""

import ast
import inspect
from collections import deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from jackfield.errors import UnboundSave
from jackfield.interleave.reference import Reference
from jackfield.trace.scope import Change

_UNKNOWN = object()
_CONTAINERS = (MutableSequence, MutableMapping, MutableSet, deque)


def refuse_changes(
    changes: Iterable[Change], outside: Mapping[str, Any], saved: Collection[str], filename: str
) -> None:
    """Raises UnboundSave for the first change of an object of `outside` whose name the block does not save as well."""
    for change in changes:
        if change.name not in saved and _is_lost(change, outside):
            raise _lost(change, outside[change.name], filename)


def _is_lost(change: Change, outside: Mapping[str, Any]) -> bool:
    owner = _value(change.owner, outside)
    if owner is _UNKNOWN or isinstance(owner, Reference):
        return False
    if change.how in ("part", "in place"):  # of a number or a text too: the name would stand for the old one outside
        return True
    return _is_array(owner) if change.how.endswith("_") else isinstance(owner, _CONTAINERS)


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _value(expression: ast.expr, outside: Mapping[str, Any]) -> Any:
    """What a name, or a part of what a name stands for, is; a Reference for any part of one."""
    if isinstance(expression, ast.Name):
        return outside.get(expression.id, _UNKNOWN)
    if not isinstance(expression, ast.Attribute | ast.Subscript):
        return _UNKNOWN
    owner = _value(expression.value, outside)
    if owner is _UNKNOWN or isinstance(owner, Reference):
        return owner
    return (
        _attribute(owner, expression.attr) if isinstance(expression, ast.Attribute) else _item(owner, expression.slice)
    )


def _attribute(owner: object, name: str) -> Any:
    if isinstance(owner, ModuleType):
        return getattr(owner, name, _UNKNOWN)
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    return _UNKNOWN if inspect.ismethoddescriptor(found) or inspect.isdatadescriptor(found) else found


def _item(owner: Any, index: ast.expr) -> Any:
    """One item; where it is not known which, any one stands for all of them."""
    if _is_array(owner):
        return owner
    if not isinstance(owner, list | tuple | dict):
        return _UNKNOWN
    items = cast("dict[Any, Any]", owner if isinstance(owner, dict) else dict(enumerate(cast("list[Any]", owner))))
    if isinstance(index, ast.Constant):
        return items.get(index.value, _UNKNOWN)
    return next(iter(items.values()), _UNKNOWN)


def _lost(change: Change, value: Any, filename: str) -> UnboundSave:
    name, kind = change.name, type(value).__name__
    made = f"{kind}()" if type(value) in (list, dict, set) else "value"
    return UnboundSave(
        f"{filename}:{change.line}: `{change.text}` changes {name!r}, a {kind} made outside the block. The block has a "
        f"copy of it, so the change would be lost. Make it in the block and save it, `{name} = {made}.save()`, or keep "
        f"the block's copy under its name: `{name}.save()`."
    )
