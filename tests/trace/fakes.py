"""A trace without a model: it takes its body as a block, and runs that at once."""

import itertools
import linecache
import sys
import textwrap
from types import FrameType
from typing import Any

from jackfield.interleave.reference import Reference
from jackfield.trace.binding import bind, keep
from jackfield.trace.capture import Block, Body

_numbers = itertools.count()


class FakeTracer:
    """What a block knows as `t`."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def save(self, **named: Any) -> None:
        self.saved.update(named)


class Trace:
    """`with Trace() as t:` lifts its body; `t.block` and `t.saved` say what came of it."""

    depth = 1  # of the frame of the `with`, from `__enter__`

    def __init__(self, tracer: object = None) -> None:
        self.tracer = tracer
        self.saved: dict[str, Any] = {}
        self.block: Block | None = None

    def __enter__(self) -> "Trace":
        frame = sys._getframe(self.depth)
        self.body: Body = Body.skip(frame, self.tracer)
        self.frame: FrameType | None = frame
        self.block = self.body.block
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        frame, self.frame = self.frame, None
        if not self.body.left(kind):
            return False
        t = FakeTracer()
        self.body.block.bind(t, "cpu")()
        self.saved = keep(t.saved)
        bind(frame, self.saved)
        return True


class Part(Reference):
    """A part of a model."""

    def __init__(self) -> None:
        self.layer_output: Any = [0]


def execute(source: str, **names: Any) -> dict[str, Any]:
    """Runs a module of its own, whose text Python keeps; its names afterwards."""
    source = textwrap.dedent(source)
    filename = f"<written {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = {"__name__": "written", "Trace": Trace, **names}
    exec(compile(source, filename, "exec"), module)
    return module


def run(block: Block, model: Any = None) -> tuple[dict[str, Any], Any]:
    """What a block saves, and what it returns."""
    t = FakeTracer()
    returned = block.bind(t, "cpu", model)()
    return t.saved, returned
