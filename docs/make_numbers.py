"""Measure how far values are in bfloat16 and write the tables of numbers.md: `python docs/make_numbers.py`.

Runs the tests' own comparison (tests/engines/transformers/bfloat16.py) over all their models, in some minutes.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).with_name("numbers.md")
sys.path.insert(0, str(PAGE.parents[1]))

from tests.engines.transformers.bfloat16 import NEEDS_MORE, Measured, measured


def measured_table(rows: Iterable[Measured]) -> str:
    """A Markdown table of what was measured, the largest error first."""
    lines = ["| value | a prompt alone | on | in a padded batch | on |", "|---|---|---|---|---|"]
    ordered = sorted(rows, key=lambda row: -max(row.alone[0], row.batched[0]))
    return "\n".join([*lines, *(f"| `{row.value}` | {_worst(row.alone)} | {_worst(row.batched)} |" for row in ordered)])


def _worst(of: tuple[float, str]) -> str:
    error, name = of
    return f"{error:.1e} | {name}" if error else "0 | all"


def allowances_table() -> str:
    """A Markdown table of the values that need more than the common tolerance."""
    lines = ["| model | value | tolerance | why |", "|---|---|---|---|"]
    rows = [
        f"| {name} | `{value}` | {more.tolerance:g} | {more.reason} |" for (name, value), more in NEEDS_MORE.items()
    ]
    return "\n".join([*lines, *rows])


def with_section(text: str, name: str, section: str) -> str:
    """The page with `section` between the markers called `name`."""
    begin, end = f"<!-- {name}: written by docs/make_numbers.py -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE.name} has no lines {begin} and {end} to write between.")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


if __name__ == "__main__":
    page = with_section(PAGE.read_text(encoding="utf-8"), "allowances", allowances_table())
    PAGE.write_text(with_section(page, "measured", measured_table(measured())), encoding="utf-8")
