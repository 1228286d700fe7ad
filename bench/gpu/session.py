"""One session on one machine: processes that take turns, every single time kept.

Plain vLLM runs before and after whatever is timed. A ratio is of these two and the one between them, so what slows
the machine down for a while slows all three.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environments import Environment
from bench.gpu.rows import ALONE, LOADS, OURS, PLAIN, Peer, Row
from bench.gpu.scales import Scale, variables
from bench.turns import Process, answered, process
from bench.worker import rotated


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `peers` have the folders of their environments, none for vLLM's own."""

    scale: Scale
    folder: Path
    batches: Sequence[int]
    rows: Sequence[Row]
    peers: Sequence[tuple[Peer, Path | None]]
    rounds: int
    warm_up: int
    mixed_rounds: int
    memory: bool
    threads: int


@dataclass(slots=True)
class Numbers:
    """What was measured: every single time, as it came. The first rounds, which warm up, are not among them."""

    times: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    mixed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    memory: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    failed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    about: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    conditions: dict[str, str] = field(default_factory=dict[str, str])


def merged(several: Sequence[Numbers]) -> Numbers:
    """Several sessions of one machine as one; ValueError where they are not of one device, or not of one commit.

    Rounds keep their numbers: of the mixed load, those of one session stay together.
    """
    first, *others = several
    for other in others:
        for what in ("device", "jackfield", "model", "lengths", "vLLM's options"):
            if other.conditions[what] != first.conditions[what]:
                raise ValueError(f"{what}: {other.conditions[what]}, and in another session {first.conditions[what]}")
    lists = {name: [one for each in several for one in getattr(each, name)] for name in ("times", "mixed", "failed")}
    names = ("memory", "left_out", "about", "conditions")
    maps = {name: {key: one for each in several for key, one in getattr(each, name).items()} for name in names}
    timed = {each["who"] for each in lists["times"]}
    maps["left_out"] = {name: why for name, why in maps["left_out"].items() if name not in timed}
    return Numbers(**lists, **maps)


def measure(plan: Plan, keep: Callable[[Numbers], None]) -> Numbers:
    """Times of all rows, of the peers' rows, of the mixed load, and memory. `keep` is told after each part."""
    numbers = Numbers()
    with _worker(plan, OURS) as engines:
        numbers.about[OURS] = engines.ask("prepare")["about"]
        for batch in plan.batches:
            rows = [row for row in plan.rows if row.runs_at(batch)]
            _take_turns(plan, numbers, engines, engines, rows, batch)
            keep(numbers)
        _mixed(plan, numbers, engines)
        for peer, environment in plan.peers:
            keep(numbers)
            _peer(plan, numbers, engines, peer, environment)
        keep(numbers)
    for who in (PLAIN, ALONE) if plan.memory else ():
        say(f"memory: {who}")
        with _worker(plan, who) as alone:
            numbers.memory[who] = alone.ask("memory", batches=list(plan.batches))
    keep(numbers)
    return numbers


@contextmanager
def _worker(plan: Plan, who: str, *paths: Path) -> Generator[Process, None, None]:
    environment = Environment(who, Path(sys.executable))
    settings = variables(plan.scale, who, *paths)
    program = ("bench.gpu.worker", plan.scale.name)
    with process(environment, plan.folder, plan.threads, program=program, **settings) as found:
        yield found


def _peer(plan: Plan, numbers: Numbers, engines: Process, peer: Peer, environment: Path | None) -> None:
    """A peer's rows. One that does not start, or dies, is left out from there on, with a line that says so."""
    say(f"{peer.name} gets ready")
    with _worker(plan, peer.name, *([] if environment is None else [environment])) as own:
        answer = answered(own, "prepare")
        if not answer:
            numbers.left_out[peer.name] = "its process ended before it was ready"
            return
        numbers.about[peer.name] = answer["about"]
        for batch in plan.batches:
            rows = [row for row in plan.rows if row.name in answer["rows"] and row.runs_at(batch)]
            _take_turns(plan, numbers, engines, own, rows, batch)


def _take_turns(plan: Plan, numbers: Numbers, engines: Process, own: Process, rows: Sequence[Row], batch: int) -> None:
    """Rounds over these rows at one batch, plain vLLM before and after each. A row that fails is not run again."""
    by_name = {row.name: row for row in rows}
    for number in range(-plan.warm_up, plan.rounds):
        say(f"{own.library}, batch {batch}: " + (f"round {number + 1} of {plan.rounds}" if number >= 0 else "warm-up"))
        before: dict[bool, float] = {}
        for name in rotated(list(by_name), number) if by_name else []:
            row = by_name[name]
            entry = _between(engines, own, row, batch, before)
            if "failed" in entry:
                numbers.failed.append(entry)
                del by_name[name]
            elif number >= 0:
                numbers.times.append({"round": number, **entry})


def _between(engines: Process, own: Process, row: Row, batch: int, before: dict[bool, float]) -> dict[str, Any]:
    """One run of a row between two of plain vLLM; the second one is the next row's first, where prompts are as long."""
    asked = {"batch": batch, "long": row.long}
    entry: dict[str, Any] = {"who": own.library, "row": row.name, "batch": batch}
    first = before.get(row.long) or engines.ask("time", who=PLAIN, row="idle", **asked)["seconds"]
    answer = answered(own, "time", who=own.library, row=row.name, **asked) or {"failed": "its process has ended"}
    if "failed" in answer:
        say(f"{own.library}, {row.name}, batch {batch}: {answer['failed']}")
        before.clear()
        return {**entry, **answer}
    second = engines.ask("time", who=PLAIN, row="idle", **asked)["seconds"]
    before.clear()
    before[row.long] = second
    return {**entry, **answer, "plain_seconds": [first, second]}


def _mixed(plan: Plan, numbers: Numbers, engines: Process) -> None:
    """Rounds of the mixed load; all that run in one round get the same lengths at the same times."""
    for number in range(-1, plan.mixed_rounds) if plan.mixed_rounds else ():
        for mode in rotated(list(LOADS), number):
            say(f"mixed load, {mode}: " + (f"round {number + 1} of {plan.mixed_rounds}" if number >= 0 else "warm-up"))
            answer = engines.ask("mixed", mode=mode, seed=number)
            if number >= 0:
                numbers.mixed.append({"round": number, "mode": mode, **answer})


def say(what: str) -> None:
    """On stderr, beside what the processes say there."""
    print(f"bench.gpu: {what}", file=sys.stderr, flush=True)
