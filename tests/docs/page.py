"""A page of the documentation as a program: its examples, and what each of them prints.

Three kinds of fences are read:

- `python` is an example. A `text` fence right after it is all that it prints; without one it prints nothing. The
  examples of a page run in order in one namespace, as if they were typed into one file. That file is written, with
  every line where the page has it, since a block is lifted out of the text of its file.
- `console` is one command, `$ jackfield ...`, and all that it writes to stdout.
- `python notest` is shown and not run: other people's libraries, and models that have to be downloaded.
"""

import contextlib
import io
import itertools
import linecache
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jackfield as jf
from jackfield import cli

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One example: `python` or a `console` command, the line of the page that it begins on, and what it should print.

    `output` is where the page says, or would say, what is printed: from and up to.
    """

    kind: str
    code: str
    line: int
    expected: str
    output: tuple[int, int]


def examples(text: str) -> list[Example]:
    """The examples of a page that are run, in order."""
    fences = list(_FENCE.finditer(text))
    found: list[Example] = []
    for fence, follower in itertools.zip_longest(fences, fences[1:]):
        if fence["info"] == "python":
            found.append(_python(text, fence, follower))
        elif fence["info"] == "console":
            found.append(_console(text, fence))
    return found


def _python(text: str, fence: re.Match[str], follower: re.Match[str] | None) -> Example:
    line = text.count("\n", 0, fence.start("body")) + 1
    if follower is None or follower["info"] != "text" or text[fence.end() : follower.start()].strip():
        return Example("python", fence["body"], line, "", (fence.end(), fence.end()))
    return Example("python", fence["body"], line, follower["body"], (fence.end(), follower.end()))


def _console(text: str, fence: re.Match[str]) -> Example:
    command, _, expected = fence["body"].partition("\n")
    start = fence.start("body") + len(command) + 1
    return Example("console", command, text.count("\n", 0, start), expected, (start, fence.end("body")))


@contextlib.contextmanager
def shared(model: jf.Model) -> Iterator[None]:
    """All pages have one sample model: they load it, and the commands close it, as a reader's would.

    A page that wants it otherwise, on another engine, gets one of its own.
    """
    demo = jf.Model.demo

    def shared_demo(**options: Any) -> jf.Model:
        return demo(**options) if options.get("engine", "transformers") != "transformers" else model

    with (
        mock.patch.object(jf.Model, "demo", side_effect=shared_demo),
        mock.patch.object(jf.Model, "close", return_value=None),
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),  # how wide a table is drawn
    ):
        yield


def run(page: Path, folder: Path) -> Iterator[tuple[Example, str]]:
    """Runs a page's examples, one after another, and gives what each prints. To be called with `folder` as the cwd.

    An error of an example is raised with the page's own line numbers, in a file of the page's name.
    """
    found = examples(page.read_text(encoding="utf-8"))
    name = f"{page.stem}.py"
    (folder / name).write_text(_program(found), encoding="utf-8")
    linecache.checkcache(name)
    module = types.ModuleType(page.stem)
    sys.modules[page.stem] = module  # a class that the page defines is looked up here when a block copies an instance
    try:
        for example in found:
            yield example, _printed(example, name, module)
    finally:
        del sys.modules[page.stem]


def _program(found: list[Example]) -> str:
    lines: list[str] = []
    for example in found:
        if example.kind == "python":
            lines += [""] * (example.line - 1 - len(lines))
            lines += example.code.splitlines()
    return "\n".join(lines) + "\n"


def _printed(example: Example, name: str, module: types.ModuleType) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if example.kind == "console":
            _command(example.code)
        else:
            code = "\n" * (example.line - 1) + example.code
            exec(compile(code, name, "exec"), module.__dict__)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def _command(line: str) -> None:
    prompt, *arguments = shlex.split(line)
    assert prompt == "$", f"a console fence begins with `$ jackfield ...`, not {line!r}"
    with mock.patch.object(sys, "argv", arguments), contextlib.suppress(SystemExit):
        cli.main()


_NUMBER = re.compile(r"[-+]?\d+\.\d+")


def agree(printed: str, expected: str) -> bool:
    """Whether two outputs are the same, but for one unit in a number's last decimal: machines round differently."""
    words, others = (" ".join(_NUMBER.sub("#", text).split()) for text in (printed, expected))
    numbers, wanted = _NUMBER.findall(printed), _NUMBER.findall(expected)
    return words == others and all(map(_near, numbers, wanted))


def _near(one: str, other: str) -> bool:
    decimals = len(other.partition(".")[2])
    return len(one.partition(".")[2]) == decimals and abs(float(one) - float(other)) < 1.5 * 10**-decimals


def with_output(text: str, printed: list[str]) -> str:
    """The page with what its examples print written into it, in the place of what it said."""
    for example, output in reversed(list(zip(examples(text), printed, strict=True))):
        start, end = example.output
        if example.kind == "console":
            text = text[:start] + output + "\n" + text[end:]
        else:
            text = text[:start] + (f"\n\n```text\n{output}\n```" if output else "") + text[end:]
    return text
