"""What a command writes: results to stdout, talk to stderr."""

import json
from collections.abc import Collection
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def busy(doing: str) -> Status:
    """A spinner on stderr while something of unknown length is done; nothing where stderr is not a terminal."""
    return Console(stderr=True).status(Text(f"{doing} ..."))


def talk(line: str) -> None:
    """Write a line to stderr."""
    typer.echo(line, err=True)


def print_line(line: str) -> None:
    """Write a line to stdout, as it is."""
    typer.echo(line)


def print_json(result: Any) -> None:
    """Write what JSON can hold to stdout."""
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(table: Table) -> None:
    """Write a table and an empty line to stdout."""
    console = Console(highlight=False)
    console.print(table)
    console.print()


def new_table(title: str, *columns: str, numbers: Collection[int] = ()) -> Table:
    """An empty table; `numbers` are the columns set to the right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in numbers else "left", header_style="dim")
    return table


def quoted(token: str) -> str:
    """A token as a table shows it: quoted, so that its spaces and line ends are seen."""
    return json.dumps(token, ensure_ascii=False)
