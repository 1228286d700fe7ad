"""The body of a `with` that is not run where it stands: a trace function ends it before its first instruction.

The instruction after the entry stores what `__enter__` returned, or drops it, and is inside the `with` already; at a
body's own first instruction it would be too late, since that may stand in a `try` of the body's. So the value is
caught as `__enter__` returns it, and stored when the `with` has been left.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

from jackfield.trace.binding import bind
from jackfield.trace.source import no_source


class Skipped(BaseException):
    """Raised in a body to end it; never seen outside of its `with`."""


class _Tracing(NamedTuple):
    """What traced before us."""

    everywhere: Any
    here: Any
    opcodes: bool


@dataclass(slots=True)
class Skip:
    """One body that is being skipped. Holds its frame only until it is left: the frame holds the tracer in turn."""

    _frame: FrameType | None
    _target: str | None
    _before: _Tracing
    _entered: Any = None
    _done: bool = False

    @classmethod
    def of(cls, frame: FrameType, target: str | None) -> "Skip":
        """To be called, however deep, from the `__enter__` that `frame` calls. Raises NoSource where tracing is off."""
        skip = cls(frame, target, _Tracing(sys.gettrace(), frame.f_trace, frame.f_trace_opcodes))
        if not _calls_tracers():
            sys.settrace(skip._before.everywhere)
            reason = "it is entered from inside a debugger or another trace function, where Python skips nothing"
            raise no_source(frame.f_code.co_filename, frame.f_lineno, reason)
        frame.f_trace_opcodes = True
        frame.f_trace = skip._end_body
        _entry(frame).f_trace = skip._catch_entered
        sys.settrace(_ignore)
        return skip

    def left(self, exception_type: type[BaseException] | None) -> bool:
        """Puts back what traced before; whether the skip ended the body. Raises NoSource if the body ran."""
        frame, self._frame = self._frame, None
        if frame is None:
            return False
        self._put_back(frame)
        if self._done and exception_type is Skipped:
            self._bind_target(frame)
            return True
        if exception_type is None or issubclass(exception_type, Exception):
            reason = "Python ran it where it stands; a debugger or profiler keeps it from being skipped"
            raise no_source(frame.f_code.co_filename, frame.f_lineno, reason)
        return False  # Ctrl-C, on the way in

    def _bind_target(self, frame: FrameType) -> None:
        entered, self._entered = self._entered, None
        if self._target is not None:
            bind(frame, {self._target: entered})

    def _end_body(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "opcode":
            self._done = True
            raise Skipped
        return self._end_body

    def _catch_entered(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "return":
            self._entered = argument
        return self._catch_entered

    def _put_back(self, frame: FrameType) -> None:
        before = self._before
        # A tracer written in C, such as coverage's, sees a frame without asking it, until it has been replaced.
        in_c = before.everywhere is not None and not isinstance(before.everywhere, FunctionType | MethodType)
        frame.f_trace = before.everywhere if in_c and before.here is None else before.here
        frame.f_trace_opcodes = before.opcodes
        sys.settrace(before.everywhere)


def reraise(error: BaseException) -> NoReturn:
    """Raises an error of a block's out of `__exit__`, with the context that it has, and not our skip as its context."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context


def _entry(frame: FrameType) -> FrameType:
    """The frame that `frame` called, and that called us."""
    called = inspect.currentframe()
    while called is not None and called.f_back is not frame:
        called = called.f_back
    assert called is not None, "a body is skipped from the __enter__ of its `with`"
    return called


def _ignore(frame: FrameType, event: str, argument: Any) -> None:
    """Other functions are not traced."""


def _nothing() -> None:
    """Called to see whether the call is noticed."""


def _calls_tracers() -> bool:
    """Whether Python calls trace functions now: inside of one, where a debugger stands, it calls no other."""
    seen: list[str] = []

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        seen.append(event)

    sys.settrace(notice)
    _nothing()
    return bool(seen)
