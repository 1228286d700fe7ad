"""What a block's code speaks of: the names it looks up outside, and every word it may mean a value by."""

import contextlib
import dis
import functools
import itertools
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from jackfield.interleave.reference import Reference

_ITEMS = 64  # of a container, looked at for functions
_LOOKS_UP = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


@functools.lru_cache(maxsize=1024)
def global_names(code: CodeType) -> frozenset[str]:
    """The names that `code`, inner functions included, looks up outside of itself."""
    every = (instruction for part in _with_inner(code) for instruction in dis.get_instructions(part))
    return frozenset(instruction.argval for instruction in every if instruction.opname in _LOOKS_UP)


@functools.lru_cache(maxsize=1024)
def assigned_outside(code: CodeType) -> frozenset[str]:
    """The outer variables and globals that `code`, inner functions included, assigns by `nonlocal` and `global`."""
    return frozenset(_assigned(code, frozenset(code.co_freevars)))


def _assigned(code: CodeType, outer: frozenset[str]) -> Iterator[str]:
    """Globals, and those of `outer`, that are assigned in `code`, for which they are free variables."""
    for instruction in dis.get_instructions(code):
        is_outer = instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in outer
        if is_outer or instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned(constant, outer.intersection(constant.co_freevars))


def words(code: CodeType, outside: Iterable[Any]) -> frozenset[str]:
    """Attributes, names and string constants of `code`, and of the user's own functions among and behind `outside`.

    A hint, on the generous side, of the values that a block may read. Installed packages are not looked into.
    """
    found, waiting, seen = set(_words(code)), list(outside), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, Reference):
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            if not _installed(value.__code__.co_filename):
                found |= _words(value.__code__)
                waiting.extend(_reached(value))
        else:
            waiting.extend(_callables(value, found))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def plain_saves(code: CodeType) -> bool:
    """Whether `code`, inner functions included, calls a `save()` without arguments."""
    return any(_saves(part) for part in _with_inner(code))


def _saves(code: CodeType) -> bool:
    calls = [i for i in dis.get_instructions(code) if i.opname not in ("PRECALL", "PUSH_NULL")]
    pairs = itertools.pairwise(calls)
    return any(
        a.argval == "save" and "LOAD" in a.opname and b.opname.startswith("CALL") and b.arg == 0 for a, b in pairs
    )


@functools.lru_cache(maxsize=1024)
def _words(code: CodeType) -> frozenset[str]:
    found: set[str] = set()
    for part in _with_inner(code):
        found |= {*part.co_names, *part.co_freevars, *_strings(part.co_consts)}
    return frozenset(found)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _strings(cast("Iterable[Any]", constant))


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _reached(function: FunctionType) -> Iterator[Any]:
    """What a function takes from outside, as it is now."""
    for name in global_names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]
    yield from closure_values(function).values()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def closure_values(function: FunctionType) -> dict[str, Any]:
    """The outer variables of `function` that have a value."""
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is assigned only later
            values[name] = cell.cell_contents
    return values


def _callables(value: Any, mentioned: set[str]) -> Iterable[Any]:
    """What may run when a block uses `value`, other than a plain function."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, ModuleType):
        return [] if _is_installed(value) else [vars(value)[name] for name in mentioned & vars(value).keys()]
    if isinstance(value, dict):
        return itertools.islice(cast("dict[Any, Any]", value).values(), _ITEMS)
    if isinstance(value, list | tuple | set):
        return itertools.islice(cast("Iterable[Any]", value), _ITEMS)
    kind = value if isinstance(value, type) else type(value)
    return [] if _is_installed(sys.modules.get(kind.__module__)) else _methods(kind)


def _methods(kind: type) -> Iterator[Any]:
    for attribute in (attribute for base in kind.__mro__[:-1] for attribute in vars(base).values()):
        if isinstance(attribute, property):
            yield attribute.fget
        elif isinstance(attribute, staticmethod | classmethod):
            yield attribute.__func__
        elif isinstance(attribute, FunctionType):
            yield attribute


def _is_installed(module: ModuleType | None) -> bool:
    """A notebook's `__main__` has no file, nor have built-in modules; what was imported by hand may be no module."""
    if module is None or module.__name__ == "__main__":
        return False
    return _installed(getattr(module, "__file__", None) or "<frozen>")


@functools.lru_cache(maxsize=4096)
def _installed(filename: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to this one."""
    paths = sysconfig.get_paths()
    own = str(Path(__file__).parents[1])
    if "site-packages" in filename or "dist-packages" in filename or filename.startswith(("<frozen", own)):
        return True
    return filename.startswith((paths["stdlib"], paths["platstdlib"]))
