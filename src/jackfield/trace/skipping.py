"""The body of a `with` that is not run where it stands: a trace function ends it at its first line."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, FunctionType, MethodType
from typing import Any

from jackfield.trace.source import no_source


class _Skipped(BaseException):
    """Raised in a body to end it; never seen outside of its `with`."""


@dataclass(slots=True)
class Skip:
    """One body that is being skipped. Holds its frame only until it is left: the frame holds the tracer in turn."""

    _frame: FrameType | None
    _lines: range
    _before: tuple[Any, Any]
    _done: bool = False

    @classmethod
    def of(cls, frame: FrameType, lines: range) -> "Skip":
        """From now on `frame` does not run `lines`. Raises NoSource where Python does not let us trace."""
        skip = cls(frame, lines, (sys.gettrace(), frame.f_trace))
        if not _calls_tracers():
            sys.settrace(skip._before[0])
            raise no_source(
                frame.f_code.co_filename, lines[0], "a debugger is stopped here, and Python skips nothing for it"
            )
        frame.f_trace = skip._trace
        sys.settrace(_ignore)
        return skip

    def left(self, exception_type: type[BaseException] | None) -> bool:
        """Puts back what traced before; whether the skip ended the body. Raises NoSource if the body ran."""
        frame, self._frame = self._frame, None
        if frame is None:
            return False
        self._put_back(frame)
        if self._done:
            return exception_type is _Skipped
        if exception_type is None or issubclass(exception_type, Exception):
            raise no_source(
                frame.f_code.co_filename, self._lines[0], "Python ran it in place, something here keeps us from tracing"
            )
        return False  # Ctrl-C on the way in

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line" and frame.f_lineno in self._lines:
            self._done = True
            raise _Skipped
        return self._trace

    def _put_back(self, frame: FrameType) -> None:
        tracer, local = self._before
        # A tracer written in C, such as coverage's, sees a frame without asking it, until it was replaced.
        if local is None and tracer is not None and not isinstance(tracer, FunctionType | MethodType):
            local = tracer
        frame.f_trace = local
        sys.settrace(tracer)


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
