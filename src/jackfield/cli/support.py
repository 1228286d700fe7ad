"""`jackfield support`: which values a model serves, and why the others are missing."""

from typing import Annotated, Any

import typer
from rich.text import Text

from jackfield.cli.loading import EngineOption, check_layer, load
from jackfield.cli.terminal import JsonOption, new_table, print_json, print_table
from jackfield.values.layer import values

ModelArgument = Annotated[str | None, typer.Argument(help="A hub name or a folder.", show_default="the sample model")]


def support(
    model: ModelArgument = None,
    engine: EngineOption = "transformers",
    layer: Annotated[int | None, typer.Option(help="Only this layer.", show_default="all layers")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the values that a model serves, and why others are missing."""
    with load(model, engine) as loaded:
        if layer is not None:
            check_layer(loaded, layer)
        reasons = dict(loaded.support(layer))
    rows = _rows(reasons)
    print_json(rows) if as_json else _print(rows)


def _rows(reasons: dict[str, str | None]) -> list[dict[str, Any]]:
    known = {value.name: value for value in values()}
    rows: list[dict[str, Any]] = []
    for name, reason in reasons.items():
        value = known.get(name)  # None for an identity between values
        facts = {"on": value.on, "axes": value.axes.split(), "access": value.access} if value else {}
        rows.append({"name": name, **facts, "available": reason is None, "reason": reason})
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    table = new_table("Values", "name", "shape", "access", "available")
    for row in rows:
        shape = f"[{', '.join(row['axes'])}]" if "axes" in row else ""
        available = Text("yes", style="green") if row["available"] else Text(f"no: {row['reason']}", style="yellow")
        table.add_row(Text(row["name"]), Text(shape), row.get("access", ""), available)
    print_table(table)
