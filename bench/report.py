"""The tables of docs/benchmarks.md: ratios first, then medians, then memory, and what they were measured on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import numbers
from bench.jobs import BY_HAND, LIBRARIES, PLAIN, key
from bench.numbers import Spread

BEGIN: Final = "<!-- measured: written by `make bench` -->"
END: Final = "<!-- /measured -->"
NONE: Final = "–"
COLUMNS: Final = ("jackfield", BY_HAND, "nnsight", "TransformerLens")


@dataclass(frozen=True, slots=True)
class Row:
    """A case that is held against a baseline. `most` is the ratio that jackfield is to keep under."""

    title: str
    job: str
    case: str
    base: str
    most: float | None = None


RATIOS: Final = (
    Row("32 tokens, nothing read; of `generate`", "generation", "untouched", "generate", 1.01),
    Row("32 tokens, every layer's stream on every step; of `generate`", "generation", "streams", "generate", 1.03),
    Row("256-token prompt, nothing read; of `generate`", "prompt", "untouched", "generate"),
    Row("256-token prompt, every layer's stream; of `generate`", "prompt", "streams", "generate", 1.03),
    Row("256-token prompt, every layer's pattern; of `generate`", "prompt", "patterns", "generate", 1.05),
    Row("256-token prompt, nothing read; of the forward", "prompt", "untouched", "forward"),
    Row("256-token prompt, every layer's stream; of the forward", "prompt", "streams", "forward", 1.03),
    Row("256-token prompt, every layer's pattern; of the forward", "prompt", "patterns", "forward", 1.05),
)
ADDED: Final = (
    Row("nothing read; over the forward", "overhead", "untouched", "forward"),
    Row("24 reads; over the forward", "overhead", "reads", "forward"),
    Row("24 edits; over the forward", "overhead", "edits", "forward"),
    Row("nothing read; over `generate`", "overhead", "untouched", "generate"),
    Row("24 reads; over `generate`", "overhead", "reads", "generate"),
    Row("24 edits; over `generate`", "overhead", "edits", "generate"),
)
# What jackfield may add, as a part of what nnsight adds in the same run.
AT_MOST_OF_NNSIGHT: Final = 0.5
HELD_TO_NNSIGHT: Final = (("untouched", "forward"), ("reads", "forward"))
EACH: Final = (("µs a read", "reads"), ("µs an edit", "edits"))
LAYERS: Final = 24
MEMORY: Final = (
    ("1,024-token prompt, one layer's stream", "long", "layer"),
    ("256-token prompt, every pattern", "prompt", "patterns"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run's numbers: seconds by job, process and case, memory, and the conditions."""

    seconds: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
    memory: Sequence[Mapping[str, Any]]
    conditions: Mapping[str, str]

    def times(self, job: str, library: str, case: str) -> tuple[Mapping[str, Sequence[float]], str] | None:
        """The process that timed a library's case, and the case's name there; None if it was not timed."""
        process = "jackfield" if library in (BY_HAND, PLAIN) else library
        timed = self.seconds.get(job, {}).get(process, {})
        name = key(library, case)
        return (timed, name) if name in timed else None

    def against(self, row: Row, library: str, measure: Any) -> Spread | None:
        """`measure` of a row's case and its baseline, which is always of the same process."""
        found = self.times(row.job, library, row.case)
        if found is None:
            return None
        timed, name = found
        return measure(timed[name], timed[key(PLAIN, row.base)])


def tables(measured: Measured) -> str:
    """All of what is written into the page."""
    parts = [
        "### Ratios",
        table(("", *COLUMNS, "target", "met"), [_ratio_row(measured, row) for row in RATIOS]),
        "### Milliseconds added to a model of 24 layers and width 64",
        table(("", *COLUMNS, "target", "met"), [_added_row(measured, row) for row in ADDED]),
        table(("", *COLUMNS), [_each_row(measured, title, case) for title, case in EACH]),
        "### Memory, in MB",
        table(("", PLAIN, *COLUMNS), _memory_rows(measured)),
        "### Milliseconds",
        table(("", "`generate`", "the forward", *COLUMNS), _absolute_rows(measured)),
        "### Conditions",
        "\n".join(f"- {name}: {value}" for name, value in measured.conditions.items()),
    ]
    return "\n\n".join(part for part in parts)


def written(page: str, tables: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with these tables between its two markers; ValueError where it has not just one pair of them."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page should have {begin} and, after it, {end}, each once")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{tables}\n\n{end}{rest.split(end)[1]}"


def write(path: Path, measured: Measured) -> None:
    """Puts a run's tables into a page."""
    path.write_text(written(path.read_text(encoding="utf-8"), tables(measured)), encoding="utf-8")


def _ratio_row(measured: Measured, row: Row) -> list[str]:
    found = [measured.against(row, library, numbers.ratio) for library in COLUMNS]
    cells = [_spread(each, 3) for each in found]
    return [row.title, *cells, NONE if row.most is None else f"{row.most:.2f}", _met(found[0], row.most)]


def _added_row(measured: Measured, row: Row) -> list[str]:
    found = {library: _milliseconds_added(measured, row, library) for library in COLUMNS}
    peer = found["nnsight"]
    held = (row.case, row.base) in HELD_TO_NNSIGHT and peer is not None
    most = AT_MOST_OF_NNSIGHT * peer.median if held and peer is not None else None
    cells = [_spread(each, 2) for each in found.values()]
    return [row.title, *cells, NONE if most is None else f"{most:.2f}", _met(found["jackfield"], most)]


def _milliseconds_added(measured: Measured, row: Row, library: str) -> Spread | None:
    found = measured.against(row, library, numbers.added)
    return None if found is None else numbers.scaled(found, 1e3)


def _each_row(measured: Measured, title: str, case: str) -> list[str]:
    """What one of 24 costs: over a trace that reads nothing, or over `generate` by hand."""
    cells: list[str] = []
    for library in COLUMNS:
        found = measured.times("overhead", library, case)
        if found is None:
            cells.append(NONE)
            continue
        timed, name = found
        base = key(library, "untouched") if library != BY_HAND else key(PLAIN, "generate")
        each = numbers.scaled(numbers.added(timed[name], timed[base]), 1e6 / LAYERS)
        cells.append(_spread(each, 0))
    return [title, *cells]


def _memory_rows(measured: Measured) -> list[list[str]]:
    found = {(each["job"], each["case"]): each for each in measured.memory}
    rows: list[list[str]] = []
    for title, job, case in MEMORY:
        plain = [found.get((job, key(PLAIN, base))) for base in ("forward", "generate")]
        libraries = [found.get((job, key(library, case))) for library in COLUMNS]
        peaks = [" / ".join(_megabytes(each, "peak_bytes") for each in plain)]
        rows.append([f"{title}: peak", *peaks, *(_megabytes(each, "peak_bytes") for each in libraries)])
        rows.append([f"{title}: kept", NONE, *(_megabytes(each, "kept_bytes") for each in libraries)])
    return rows


def _absolute_rows(measured: Measured) -> list[list[str]]:
    rows: dict[tuple[str, str], str] = {}
    for row in (*RATIOS, *ADDED):
        rows.setdefault((row.job, row.case), row.title.rpartition(";")[0])
    return [
        [
            f"24 layers, {title}" if job == "overhead" else title,
            *(_median(measured, job, PLAIN, base) for base in ("generate", "forward")),
            *(_median(measured, job, library, case) for library in COLUMNS),
        ]
        for (job, case), title in rows.items()
    ]


def _median(measured: Measured, job: str, library: str, case: str) -> str:
    found = measured.times(job, library, case)
    if found is None:
        return NONE
    return _spread(numbers.scaled(numbers.spread(found[0][found[1]]), 1e3), 1)


def _spread(found: Spread | None, digits: int) -> str:
    if found is None:
        return NONE
    return f"{found.median:.{digits}f} ({found.lower:.{digits}f} to {found.upper:.{digits}f})"


def _megabytes(found: Mapping[str, Any] | None, field: str) -> str:
    return NONE if found is None else f"{found[field] / 1e6:.1f}"


def _met(found: Spread | None, most: float | None) -> str:
    if found is None or most is None:
        return NONE
    return "yes" if found.median <= most else "**no**"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


__all__ = ["BEGIN", "COLUMNS", "END", "LIBRARIES", "NONE", "Measured", "Row", "table", "tables", "write", "written"]
