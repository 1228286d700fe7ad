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


class _Before(NamedTuple):
    """What traced before us: the tracer of all calls, and what it asked for in the frame of the `with`."""

    everywhere: Any
    here: Any
    opcodes: bool

    @property
    def in_c(self) -> bool:
        """Whether it is written in C, as coverage's: it is told of every frame, whatever the frame's `f_trace`."""
        alone = self.everywhere is not None and self.here in (None, self.everywhere)
        return alone and not isinstance(self.everywhere, FunctionType | MethodType)


@dataclass(slots=True)
class Skip:
    """One body that is being skipped. Holds its frame only until it is left: the frame holds the tracer in turn."""

    _frame: FrameType | None
    _target: str | None
    _before: _Before
    _entered: Any = None
    _done: bool = False

    @classmethod
    def of(cls, frame: FrameType, target: str | None) -> "Skip":
        """To be called, however deep, from the `__enter__` that `frame` calls. Raises NoSource where tracing is off."""
        skip = cls(frame, target, _Before(sys.gettrace(), frame.f_trace, frame.f_trace_opcodes))
        if not _calls_tracers():
            sys.settrace(skip._before.everywhere)
            reason = "it is entered from inside a debugger or another trace function, where Python skips nothing"
            raise no_source(frame.f_code.co_filename, frame.f_lineno, reason)
        frame.f_trace_opcodes = True
        frame.f_trace = skip._end_body
        for called in _called_by(frame):
            called.f_trace = skip._watch(skip._before.everywhere if skip._before.in_c else called.f_trace)
        sys.settrace(_ignore)
        return skip

    def left(self, exception_type: type[BaseException] | None) -> bool:
        """Puts back what traced before; whether the skip ended the body. Raises NoSource if the body ran."""
        frame, self._frame = self._frame, None
        if frame is None:
            return False
        self._put_back(frame, left=True)
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
        if event == "exception":  # `__enter__` failed after all: there will be no body
            self._frame = None
            self._put_back(frame, left=False)
        return self._end_body

    def _watch(self, local: Any) -> Callable[..., Any]:
        """Catches what `__enter__` returns. Tracers count calls and returns: `local` is told of all."""

        def watch(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if event == "return" and frame.f_back is self._frame:
                self._entered = argument
            if local is not None:
                local(frame, event, argument)
            return watch

        return watch

    def _put_back(self, frame: FrameType, *, left: bool) -> None:
        """`left`: out of `__exit__`. A tracer in C will see that return, and has not seen it called: it is told."""
        before = self._before
        frame.f_trace, frame.f_trace_opcodes = before.here, before.opcodes
        callers = reversed(_called_by(frame)) if before.in_c and left else ()
        sys.settrace(before.everywhere)
        for called in callers:
            before.everywhere(called, "call", None)  # with which it also goes on in C


def reraise(error: BaseException) -> NoReturn:
    """Raises an error of a block's out of `__exit__`, with the context that it has, and not our skip as its context."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context  # the traceback leads to this frame: the cycle would keep the block's tensors alive


def _called_by(frame: FrameType) -> list[FrameType]:
    """The frames that lead from `frame` to our caller, the last one first."""
    called = inspect.currentframe()
    called, frames = called and called.f_back, list[FrameType]()
    while called is not None and called is not frame:
        frames.append(called)
        called = called.f_back
    return frames


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
