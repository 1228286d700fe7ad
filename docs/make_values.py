"""Write the table of values into values.md, out of the code: `python docs/make_values.py`."""

from collections.abc import Iterable
from pathlib import Path

import jackfield as jf

PAGE = Path(__file__).with_name("values.md")
BEGIN, END = "<!-- values: written by docs/make_values.py -->", "<!-- /values -->"


def table(values: Iterable[jf.Value]) -> str:
    """A Markdown table of values, in their order."""
    rows = ["| on | name | shape | dtype | access | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, values)])


def _row(value: jf.Value) -> str:
    shape = f"[{', '.join(value.axes.split())}]"
    dtype = "the model's" if value.dtype == "model" else value.dtype
    return f"| {value.on} | `{value.name}` | {shape} | {dtype} | {value.access} | {value.meaning} |"


def with_table(text: str) -> str:
    """The page with the table between its markers as the code has it now."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE.name} has no lines {BEGIN} and {END} to write the table between.")
    return f"{before}{BEGIN}\n\n{table(jf.values())}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
