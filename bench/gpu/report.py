"""The tables of a session: parts of plain vLLM's speed, the mixed load, memory, and what they were measured on."""

import statistics
from collections.abc import Sequence
from typing import Any, Final

from bench import numbers as spreads
from bench.gpu.rows import ALONE, LOADS, MEMORY_GIB, OURS, PEERS, PLAIN, ROWS, Row
from bench.gpu.scales import GIB
from bench.gpu.session import Numbers
from bench.numbers import Spread
from bench.report import NONE, table

BEGIN: Final = "<!-- measured: written by `make bench-gpu` -->"
END: Final = "<!-- /measured by `make bench-gpu` -->"


def tables(found: Numbers, *, new: int, targets: bool = True) -> str:
    """All of what is written. `new`: tokens that each request made; without `targets`, nothing is held against them."""
    peers = [peer.name for peer in PEERS if any(each["who"] == peer.name for each in found.times)]
    parts = [
        "### Of plain vLLM's speed",
        table(
            ("", "batch", "plain vLLM, tokens/s", OURS, "target", "met", *peers), _speeds(found, peers, new, targets)
        ),
        *_said(found),
        *_mixed(found),
        *_memory(found, targets),
        "### Conditions of these",
        "\n".join(f"- {name}: {value}" for name, value in found.conditions.items()),
    ]
    return "\n\n".join(parts)


def _speeds(found: Numbers, peers: Sequence[str], new: int, targets: bool) -> list[list[str]]:
    batches = sorted({each["batch"] for each in (*found.times, *found.failed)})
    asked = [(row, batch) for row in ROWS for batch in batches if row.runs_at(batch)]
    timed = {(each["row"], each["batch"]) for each in (*found.times, *found.failed)}
    return [_row(found, row, batch, peers, new, targets) for row, batch in asked if (row.name, batch) in timed]


def _row(found: Numbers, row: Row, batch: int, peers: Sequence[str], new: int, targets: bool) -> list[str]:
    ours, least = _part(found, OURS, row, batch), row.least.get(batch) if targets else None
    failed = any((each["who"], each["row"], each["batch"]) == (OURS, row.name, batch) for each in found.failed)
    mine = ["**failed**" if failed else _shown(ours), NONE if least is None else f"{least:g}"]
    met = "**no**" if failed else _met(ours, least)
    return [row.title, str(batch), _rate(found, row, batch, new), *mine, met] + [
        _shown(_part(found, peer, row, batch)) for peer in peers
    ]


def _timed(found: Numbers, who: str | None, row: Row, batch: int) -> list[dict[str, Any]]:
    of = [each for each in found.times if each["row"] == row.name and each["batch"] == batch]
    return [each for each in of if who is None or each["who"] == who]


def _part(found: Numbers, who: str, row: Row, batch: int) -> Spread | None:
    """Of plain vLLM's speed: the mean of its two times around each time, over that time."""
    timed = _timed(found, who, row, batch)
    if not timed:
        return None
    return spreads.ratio(
        [statistics.fmean(each["plain_seconds"]) for each in timed], [each["seconds"] for each in timed]
    )


def _rate(found: Numbers, row: Row, batch: int, new: int) -> str:
    seconds = [one for each in _timed(found, None, row, batch) for one in each["plain_seconds"]]
    return f"{batch * new / statistics.median(seconds):,.0f}" if seconds else NONE


def _shown(part: Spread | None) -> str:
    return NONE if part is None else f"{part.median:.3f} ({part.lower:.3f} to {part.upper:.3f})"


def _met(part: Spread | None, least: float | None) -> str:
    if part is None or least is None:
        return NONE
    return "yes" if part.median >= least else "**no**"


def _said(found: Numbers) -> list[str]:
    """What is not in the table, and why."""
    missing = [f"- {name}: left out, {reason}" for name, reason in found.left_out.items()]
    failed = [f"- {each['who']}, {each['row']}, batch {each['batch']}: {each['failed']}" for each in found.failed]
    return ["\n".join(missing + failed)] if missing or failed else []


def _mixed(found: Numbers) -> list[str]:
    if not found.mixed:
        return []
    head = ("", "tokens/s", "of plain vLLM", "ms per token: median", "p99")
    return ["### A long mixed load", table(head, [_load(found, mode, title) for mode, title in LOADS.items()])]


def _load(found: Numbers, mode: str, title: str) -> list[str]:
    """Rates are of whole rounds; times per token are those of all requests of all rounds."""
    rates = {name: [each["tokens"] / each["seconds"] for each in found.mixed if each["mode"] == name] for name in LOADS}
    each_ms = sorted(1e3 * one for each in found.mixed if each["mode"] == mode for one in each["per_token_s"])
    p99 = each_ms[min(len(each_ms) - 1, int(0.99 * len(each_ms)))]
    part = NONE if mode == PLAIN else _shown(spreads.ratio(rates[mode], rates[PLAIN]))
    return [title, f"{statistics.median(rates[mode]):,.0f}", part, f"{statistics.median(each_ms):.2f}", f"{p99:.2f}"]


def _memory(found: Numbers, targets: bool) -> list[str]:
    if not found.memory:
        return []
    plain, ours = found.memory[PLAIN], found.memory[ALONE]
    rows: list[list[str]] = []
    for name, title in (("started_bytes", "started"), ("worked_bytes", "after the rows of the table")):
        more = (ours[name] - plain[name]) / GIB
        met = ("yes" if more < MEMORY_GIB else "**no**") if targets else NONE
        rows.append([title, f"{plain[name] / GIB:.2f}", f"{ours[name] / GIB:.2f}", f"{more:.2f}", met])
    head = ("", "plain vLLM", OURS, "more", f"under {MEMORY_GIB:g}")
    return ["### Memory of the device, in GiB, each in a process of its own", table(head, rows)]
