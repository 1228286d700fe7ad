"""What a user wrote, taken as a Block: code, and the values it uses from outside; nothing of any engine.

A block comes from a function, or is lifted from the body of a `with` statement, whose own run is skipped. Each request
binds the block to its tracer `t` and gets copies of its own of everything that the block uses from outside.
"""

import builtins
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from jackfield.errors import TracingError, UnboundSave
from jackfield.trace.binding import visible_names
from jackfield.trace.changes import refuse_changes
from jackfield.trace.copies import Outside, copy_outside
from jackfield.trace.lifting import BodyText, body_code, body_text, function_text
from jackfield.trace.mentions import assigned_outside, closure_values, global_names, plain_saves, words
from jackfield.trace.saves import SAVE
from jackfield.trace.skipping import Skip
from jackfield.trace.source import definition, no_source, with_statement


@dataclass(frozen=True, slots=True)
class Block:
    """A block, ready to be bound to a request.

    `names` is every attribute, name and string that the block's code mentions, functions of the user's that it uses
    included: a hint of which values it may read. `saved_names` are those of its `.save()`s, in order. `origin` is
    "file:line". `tracers` are the outside names that are `t` inside. `takes_model`: it is called with (model, t).
    """

    code: CodeType
    outside: Mapping[Outside, Any]
    names: frozenset[str]
    saved_names: tuple[str, ...]
    origin: str
    module: str
    tracers: frozenset[str] = frozenset()
    takes_model: bool = False

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> "Block":
        """A block of a plain function of (model, t); a method, a lambda or a partial of one will do.

        Raises TracingError for what is no such function, NoSource for one that saves by `.save()` and whose text is not
        to be had, UnboundSave for a save, or a change of an outside object, that would be lost.
        """
        plain, given = _plain(function)
        code, saved = _rewritten(plain)
        outside = {**given, **_taken(plain)}
        names = words(plain.__code__, outside.values())
        origin = f"{code.co_filename}:{code.co_firstlineno}"
        return cls(code, outside, names, saved, origin, plain.__module__, takes_model=True)

    def bind(self, t: Any, device: torch.device | str | None, model: Any = None) -> Callable[[], Any]:
        """The block for one request: a function of no arguments that runs it, on fresh copies of what is outside.

        `t` needs a method `save(**values)`. `model` is what a block made from a function is called with. Copies of
        tensors are on `device` (None: where they were). Raises TracingError for a value that cannot be copied.
        """
        copies = copy_outside(self.outside, device)
        own = {"__builtins__": builtins, "__name__": self.module, SAVE: _saver(t)}
        own |= _of(copies, "global") | dict.fromkeys(self.tracers, t)
        function = _function(_anew(self.code), own, copies)
        if self.takes_model:
            return functools.partial(function, *_of(copies, "argument").values(), model, t, **_of(copies, "keyword"))
        return functools.partial(function, *(own[name] for name in self.code.co_varnames[: self.code.co_argcount]))


@dataclass(slots=True)
class Body:
    """The body of a `with` statement: taken as a block, and not run where it stands."""

    block: Block
    _skip: Skip = field(repr=False)

    @classmethod
    def skip(cls, frame: FrameType, tracer: object = None) -> "Body":
        """To be called while `frame` enters its `with`; until `left` the frame does not run the body.

        Names that are bound to `tracer` in the frame, and the one that the `with` binds, are `t` in the block. Raises
        NoSource or UnboundSave, before anything has run or been changed.
        """
        code = frame.f_code
        found = with_statement(code, frame.f_lasti, frame.f_globals)
        seen = visible_names(frame)
        tracers = frozenset(name for name, value in seen.items() if tracer is not None and value is tracer)
        text = body_text(found, tracers)
        block = _lifted(text, seen, tracers | text.targets, frame)
        return cls(block, Skip.of(frame, text.target))

    def left(self, exception_type: type[BaseException] | None) -> bool:
        """To be called when the `with` is left: whether it was by our own skip, and the block is now to be run.

        Raises NoSource where the body ran in place after all.
        """
        return self._skip.left(exception_type)


def _lifted(text: BodyText, seen: Mapping[str, Any], tracers: frozenset[str], frame: FrameType) -> Block:
    used = {name: seen[name] for name in sorted(text.reads - tracers) if name in seen}
    refuse_changes(text.changes, used, text.saved, text.place.filename)
    parameters = tuple(sorted(text.early & (used.keys() | tracers)))
    code = body_code(text, frame.f_code.co_name, parameters)
    outside = {Outside("global", name): value for name, value in used.items()}
    origin = f"{text.place.filename}:{text.lines[0]}"
    return Block(
        code,
        outside,
        words(text.written, used.values()),
        text.saved,
        origin,
        frame.f_globals.get("__name__", "__main__"),
        tracers,
    )


def _plain(function: Any) -> tuple[FunctionType, dict[Outside, Any]]:
    """The function behind methods, partials and objects that can be called, and the arguments these give it."""
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    while not isinstance(function, FunctionType):
        if isinstance(function, functools.partial):
            positional, named = (*function.args, *positional), {**function.keywords, **named}
            function = function.func
        elif isinstance(function, MethodType):
            function, positional = function.__func__, (function.__self__, *positional)
        elif isinstance(called := _called(function), FunctionType):
            function = MethodType(called, function)
        else:
            raise TracingError(f"A block is a function `block(model, t)` written in Python; this is {function!r}.")
    if function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise TracingError(f"A block is a plain function: {function.__qualname__} is a generator or a coroutine.")
    given = {Outside("argument", str(index)): value for index, value in enumerate(positional)}
    return function, given | {Outside("keyword", name): value for name, value in named.items()}


def _called(instance: object) -> object:
    return inspect.getattr_static(type(instance), "__call__", None)


def _rewritten(function: FunctionType) -> tuple[CodeType, tuple[str, ...]]:
    """The function's code with its saves rewritten, and their names; as it is where it has none and no text."""
    code = function.__code__
    for name in assigned_outside(code):
        raise UnboundSave(
            f"{code.co_filename}:{code.co_firstlineno}: the block assigns {name!r}, a variable of the code around it. "
            f"It has a copy, so that would be lost. Use a name of the block's own, and save it: `t.save({name}=value)`."
        )
    found = definition(code, function.__globals__)
    if found is None:
        if plain_saves(code):
            raise no_source(code.co_filename, code.co_firstlineno, "it has a `.save()`, and Python has no text of it")
        return code, ()
    text = function_text(found, code)
    outside = {**function.__globals__, **closure_values(function)}
    refuse_changes(text.changes, outside, text.saved, code.co_filename)
    return text.code, text.saved


def _taken(function: FunctionType) -> dict[Outside, Any]:
    """What a function takes from outside: globals, outer variables, default values."""
    module = function.__globals__
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named = zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    taken = {
        Outside("global", name): module[name] for name in sorted(global_names(function.__code__)) if name in module
    }
    taken |= {Outside("cell", name): value for name, value in closure_values(function).items()}
    taken |= {Outside("default", name): value for name, value in named}
    return taken | {Outside("keyword default", name): value for name, value in (function.__kwdefaults__ or {}).items()}


def _saver(t: Any) -> Callable[[str, Any], Any]:
    def save(name: str, value: Any) -> Any:
        t.save(**{name: value})
        return value

    return save


def _function(code: CodeType, module: dict[str, Any], copies: Mapping[Outside, Any]) -> FunctionType:
    cells = _of(copies, "cell")
    closure = tuple(CellType(cells[name]) if name in cells else CellType() for name in code.co_freevars)
    function = FunctionType(code, module, code.co_name, tuple(_of(copies, "default").values()), closure)
    function.__kwdefaults__ = _of(copies, "keyword default")
    return function


def _anew(code: CodeType) -> CodeType:
    """The same code, its functions included, which torch.compile has not seen.

    What it makes of them for one request takes names out of that request's globals.
    """
    constants = (_anew(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=tuple(constants))


def _of(copies: Mapping[Outside, Any], kind: str) -> dict[str, Any]:
    return {place.name: value for place, value in copies.items() if place.kind == kind}
