"""A file of prompts, one a line: checked whole before anything runs, then read line by line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import typer

from jackfield.engines.prompt import parse_prompt

KEYS = ("text", "prompt", "token_ids", "messages")


class PromptFile:
    """Prompts in a file: of .jsonl, objects with one of KEYS; of any other, each line is the text of one.

    Raises:
        typer.BadParameter: no such file, no line in it, or, with its number, a line that is no prompt.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        if not file.is_file():
            raise _refused(f"there is no file {file}.")
        self._count = sum(1 for _ in self._read())
        if not self._count:
            raise _refused(f"{file} is empty.")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self._read()

    def _read(self) -> Iterator[Any]:
        number = 0
        try:
            with self._file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):  # noqa: B007 - for the message
                    yield self._prompt(line.rstrip("\n"))
        except UnicodeDecodeError:
            raise _refused(f"{self._file}, after line {number}: this is not UTF-8.") from None
        except ValueError as error:
            raise _refused(f"{self._file}, line {number}: {error}") from None

    def _prompt(self, line: str) -> Any:
        if self._file.suffix != ".jsonl":
            return line
        try:
            read = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not JSON: {error}.") from None
        if isinstance(read, dict):
            listed = cast("dict[str, Any]", read)
            found = [key for key in KEYS if key in listed]
            if len(found) == 1:
                parse_prompt(listed[found[0]])
                return listed[found[0]]
        raise ValueError(f"write an object with one of {', '.join(KEYS)}; this is {line:.60}")


def _refused(why: str) -> typer.BadParameter:
    return typer.BadParameter(why, param_hint="PROMPTS")
