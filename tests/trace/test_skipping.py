"""Where a body may stand, and what may be watching while it is skipped."""

import gc
import linecache
import os
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jackfield.errors import NoSource
from jackfield.trace.skipping import reraise
from tests.trace.fakes import Trace, execute

REPOSITORY = Path(__file__).parents[2]

REFUSED = {
    "return": ("def f():\n  with Trace() as t:\n    return 1\nf()", "`return`", 3),
    "yield": ("def f():\n  with Trace() as t:\n    x = yield\nnext(f())", "`yield`", 3),
    "await": ("async def f():\n  with Trace() as t:\n\n    await g()\nf().send(None)", "`await`", 4),
    "async with": ("async def f():\n  with Trace() as t:\n    async with g(): pass\nf().send(None)", "`async with`", 3),
    "async for": (
        "async def f():\n  with Trace() as t:\n    async for a in g(): pass\nf().send(None)",
        "`async for`",
        3,
    ),
    "async comprehension": (
        "async def f():\n  with Trace() as t:\n    x = [a async for a in g()]\nf().send(None)",
        "async",
        None,
    ),
    "break": ("for i in range(3):\n  with Trace() as t:\n    break", "a `break` of a loop around it", 3),
    "continue": ("while True:\n  with Trace() as t:\n    if 1:\n      continue", "a `continue` of a loop", 4),
    "break in an else": (
        "while True:\n  with Trace():\n    for i in []: pass\n    else: break",
        "a `break` of a loop",
        4,
    ),
    "global": ("def f():\n  with Trace() as t:\n    global x\n    x = 1\nf()", "`global`", 3),
    "global further in": ("with Trace() as t:\n  def f():\n    global x\n  f()", "`global`", 3),
    "nonlocal": (
        "def f():\n  x = 1\n  def g():\n    with Trace():\n      nonlocal x\n      x = 2\n  g()\nf()",
        "`nonlocal`",
        5,
    ),
    "nonlocal further in": (
        "def f():\n  x = 1\n  with Trace() as t:\n    def g():\n      nonlocal x\n      x = 2\n  return x\nf()",
        "a `nonlocal` of a variable",
        5,
    ),
    "nonlocal in a class": (
        "def f():\n  x = 1\n  with Trace() as t:\n    class A:\n      nonlocal x\n      x = 2\n  return x\nf()",
        "a `nonlocal` of a variable",
        5,
    ),
    "super": ("class A:\n  def f(self):\n    with Trace():\n      x = super().f\nA().f()", r"`super\(\)`", 4),
    "import star": ("with Trace() as t:\n  from math import *", r"`import \*`", 2),
    "not the last item": ("with Trace() as t, open(name) as f:\n  x = 1", "put it last", 1),
    "attribute target": ("class A: pass\na = A()\nwith Trace() as a.t:\n  x = 1", "not a plain name", 3),
    "no with": ("t = Trace().__enter__()", "not entered by a `with`", 1),
    "inside another call": ("with stack() as s:\n  s.enter_context(Trace())", "not entered by a `with`", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_lifted_is_refused_with_its_line_and_the_other_form(name: str) -> None:
    from contextlib import ExitStack

    text, message, line = REFUSED[name]
    with pytest.raises(NoSource, match=message) as caught:
        execute(text, stack=ExitStack)
    assert "result = model.run(prompt, block)" in str(caught.value)
    assert line is None or f":{line} cannot be lifted" in str(caught.value)
    assert sys.gettrace() is None or "coverage" in sys.modules


HEADERS = {
    "one line": "with Trace() as t: x = (y + 1).save(); z = x.save()",
    "parentheses": "with (\n  Trace() as t\n):\n  x = (y + 1).save()",
    "two items": "with open_() as a, Trace() as t:\n  x = (y + 1).save()",
    "two items over lines": "with (\n  open_() as a,\n  Trace() as t,\n):\n  x = (y + 1).save()",
    "header over lines": "with Trace(\n  tracer=None,\n) as t:\n  x = (y + 1).save()",
    "no target": "with Trace():\n  x = (y + 1).save()",
    "two of them": "with Trace() as s:\n  y = (y + 0).save()\nwith Trace() as t:\n  x = (y + 1).save()",
    "inside a with": "with open_():\n  with Trace() as t:\n    x = (y + 1).save()",
    "backslash": "with open_() as a, \\\n  Trace() as t:\n  x = (y + 1).save()",
    "try first": "with Trace() as t:\n  try:\n    x = (y + 1).save()\n  finally:\n    ran()",
    "bare except first": "with Trace() as t:\n  try:\n    x = (y + 1).save()\n  except:\n    ran()",
}


class open_:  # noqa: N801
    def __enter__(self) -> int:
        return 1

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize("inside", ["module", "function"])
@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, inside: str) -> None:
    ran: list[int] = []
    text = f"y = 1\n{HEADERS[name]}"
    if inside == "function":
        text = "def f():\n " + text.replace("\n", "\n ") + "\n return x, y\nx, y = f()"
    module = execute(text, open_=open_, ran=lambda: ran.append(1))
    assert (module["x"], module["y"]) == (2, 1)
    assert len(ran) == (name == "try first"), "the body's own handlers ran where it stands"


def test_in_a_test_with_rewritten_asserts() -> None:
    limit = 3
    with Trace() as t:
        assert limit < 5, f"{limit} is too much"
        x = (limit + 1).save()
        assert x == 4
    assert (x, t.saved) == (4, {"x": 4})


def test_the_loop_around_a_with_goes_on() -> None:
    rows = []
    for i in range(3):
        with Trace() as t:
            x = (i * 2).save()
        rows.append((x, t.saved["x"]))
    assert rows == [(0, 0), (2, 2), (4, 4)]


def test_a_body_under_another_trace_that_runs_in_place() -> None:
    class Outer:
        def __enter__(self) -> "Outer":
            return self

        def __exit__(self, *error: object) -> None: ...

    with Outer() as t:
        with Trace(tracer=t):
            t.save(a=1)
            x = t.saved.copy().save()
        with Trace(tracer=t) as second:
            y = (2).save()
    assert (x, y, second.saved) == ({"a": 1}, 2, {"y": 2})


def test_an_error_keeps_its_class_its_line_and_its_context() -> None:
    module: dict[str, Any] = {}
    text = "with Trace() as t:\n  try:\n    1 / 0\n  except ZeroDivisionError:\n    x = [][3]"
    with pytest.raises(IndexError) as caught:
        execute(text, **module)
    entry = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (entry.filename[:8], entry.lineno, entry.line, entry.name) == ("<written", 5, "x = [][3]", "<module>")
    assert "<written" in "".join(traceback.format_exception(caught.value))


def test_an_error_is_raised_again_without_our_skip_around_it() -> None:
    error = ValueError("x")
    error.__context__ = KeyError("y")

    def leave() -> None:
        try:
            raise OSError("the skip")
        except OSError:
            reraise(error)

    with pytest.raises(ValueError, match="x"):
        leave()
    assert isinstance(error.__context__, KeyError)


def test_an_entry_that_fails_after_all_leaves_nothing_behind() -> None:
    class Late(Trace):
        depth = 2

        def __enter__(self) -> "Late":
            super().__enter__()
            raise LookupError

    text = "def f():\n  try:\n    with Late() as t:\n      x = 1\n  except LookupError:\n    return 2\nx = f()"
    assert execute(text, Late=Late)["x"] == 2


def test_ctrl_c_in_the_body() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute("with Trace() as t:\n  interrupt()", interrupt=interrupt)


# -- what else may be tracing


@pytest.fixture
def restored() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


def test_a_tracer_is_put_back_and_sees_every_line_outside_of_the_body(restored: None) -> None:
    lines: list[int] = []
    depth = 0

    def tracer(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal depth
        depth += (event == "call") - (event == "return")
        if event == "line" and frame.f_code.co_name == "traced" and "written" in frame.f_code.co_filename:
            lines.append(frame.f_lineno)
        return tracer

    text = "def traced():\n  y = 1\n  with Trace() as t:\n    x = y.save()\n  x += 1\n  return x"
    traced = execute(text)["traced"]
    sys.settrace(tracer)
    traced()
    found, balance = sys.gettrace(), depth
    sys.settrace(None)
    assert found is tracer
    assert balance == 0
    assert [line for line in lines if line != 4] == [2, 3, 5, 6]


def test_a_frame_that_was_not_traced_is_not_traced_afterwards(restored: None) -> None:
    with Trace() as t:
        x = (1).save()
    frame = sys._getframe()
    assert (frame.f_trace_opcodes, x, t.saved) == (False, 1, {"x": 1})
    assert frame.f_trace is None or sys.gettrace() is not None


def test_where_a_debugger_stands_it_is_refused_and_not_run(restored: None) -> None:
    seen: list[BaseException] = []
    ran: list[int] = []

    def debugger(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "stop_here":
            try:
                execute("with Trace() as t:\n  ran()", ran=lambda: ran.append(1))
            except NoSource as error:
                seen.append(error)

    def stop_here() -> None: ...

    sys.settrace(debugger)
    stop_here()
    sys.settrace(None)
    assert not ran
    assert "debugger" in str(seen[0])


def test_a_body_that_ran_in_place_is_never_taken_for_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.trace.skipping._ignore", None)  # as if something took tracing away again
    with pytest.raises(NoSource, match="ran it where it stands"):
        execute("with Trace() as t:\n  x = 1")


def test_frames_and_traces_are_freed_without_the_collector() -> None:
    class Big: ...

    def f() -> weakref.ref[Big]:
        big = Big()
        with Trace() as t:
            x = (1).save()
        assert (x, t.saved) == (1, {"x": 1})
        return weakref.ref(big)

    f()
    gc.disable()
    try:
        assert f()() is None
    finally:
        gc.enable()


# -- where Python finds the text


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.ast_node_interactivity = "last_expr"
    made = InteractiveShell(config=config, ipython_dir=str(tmp_path), user_ns={"Trace": Trace})
    yield made
    made.atexit_operations = lambda: None


@pytest.mark.slow
def test_a_notebook_runs_the_text_of_this_cell(shell: InteractiveShell) -> None:
    for number in (1, 2):
        cell = f"before = 1\nwith Trace() as t:\n    x = (before + {number}).save()\nx"
        assert shell.run_cell(cell).result == 1 + number
    assert shell.run_cell("def double(x):\n    return x * 2").success
    cell = "with Trace() as t:\n    x = double(4).save()\nx, sorted(t.block.names & {'double', 'x', 'save'})"
    assert shell.run_cell(cell).result == (8, ["double", "save"])
    shell.run_cell("def double(x):\n    return x * 3")
    assert shell.run_cell(cell).result[0] == 12
    for magic in ("%time", "%%time", "%%capture"):
        shell.run_cell(f"{magic}\nwith Trace() as t:\n    x = 5 .save()", store_history=True).raise_error()
        assert shell.user_ns.pop("x") == 5


def test_a_file_that_was_edited_after_its_import_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    text = "def f():\n    with Trace() as t:\n        x = 4.0 .save()\n    return x\n"
    path.write_text(text)
    module: dict[str, Any] = {"Trace": Trace}
    exec(compile(text, str(path), "exec"), module)
    path.write_text(text.replace("4.0", "8.0"))
    with pytest.raises(NoSource, match="the text has changed"):
        module["f"]()
    path.write_text(text)
    linecache.checkcache(str(path))
    assert module["f"]() == 4.0


def test_a_stale_copy_of_the_text_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    with Trace() as t:\n        x = 4 .save()\n    return x\n")
    linecache.getlines(str(path))
    path.write_text("def f():\n    with Trace() as t:\n        x = 9 .save()\n    return x  # longer\n")
    module: dict[str, Any] = {"Trace": Trace}
    exec(compile(path.read_text(), str(path), "exec"), module)
    assert module["f"]() == 9


def test_without_a_text_the_error_shows_the_other_form() -> None:
    with pytest.raises(NoSource, match=r"no text(.|\n)*model\.run\(prompt, block\)"):
        exec("with Trace() as t:\n    x = 1", {"Trace": Trace})


def python(*arguments: str, text: str | None = None) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
from tests.trace.fakes import Trace
def f(k):
    with Trace() as t:
        x = (k + 1).save()
    return x
with Trace() as t:
    rows = [1, 2].save()
print(rows, f(1))
"""


@pytest.mark.slow
def test_a_program_on_the_command_line() -> None:
    assert python("-c", PROGRAM) == "[1, 2] 2\n"


@pytest.mark.slow
def test_a_script_and_under_a_debugger(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)
    assert python(str(path)) == "[1, 2] 2\n"
    output = python("-m", "pdb", str(path), text="b 6\nc\np x\nc\nq\n")
    assert "[1, 2] 2" in output
    assert "(Pdb) 2\n" in output


@pytest.mark.slow
@pytest.mark.parametrize("core", ["ctrace", "pytrace"])
def test_coverage_sees_every_line(core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("coverage")
    monkeypatch.setenv("COVERAGE_CORE", core)
    monkeypatch.setenv("COVERAGE_FILE", str(tmp_path / "data"))
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)
    python("-m", "coverage", "run", f"--include={path}", str(path))
    assert python("-m", "coverage", "report", "-m").splitlines()[-1].endswith("100%")
