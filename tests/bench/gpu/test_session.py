"""Turns of plain vLLM and of what is timed, with processes that answer at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.load import drawn
from bench.gpu.rows import PLAIN, ROWS, Row
from bench.gpu.scales import CPU, Load
from bench.gpu.session import Numbers, Plan, _take_turns

SHORT, OTHER, LONG = Row("idle", ""), Row("probe", ""), Row("pattern-long", "", single=True, long=True)


class Answering:
    """A process that tells what it was asked, and whose clock says how often it was."""

    def __init__(self, library: str, failing: str = "") -> None:
        self.library, self.alive, self.failing, self.asked = library, True, failing, list[str]()

    def ask(self, do: str, *, who: str, row: str, batch: int, long: bool) -> dict[str, Any]:
        self.asked.append(("plain" if who == PLAIN else row) + (" long" if long else ""))
        if row == self.failing:
            return {"failed": "it did not"}
        return {"seconds": float(len(self.asked))}


def turns(process: Answering, rows: Sequence[Row], rounds: int = 1, warm_up: int = 0) -> Numbers:
    numbers = Numbers()
    plan = Plan(CPU, Path(), [1], rows, [], rounds, warm_up, 0, False, 1)
    _take_turns(plan, numbers, process, process, rows, 1)  # type: ignore[arg-type]
    return numbers


def test_plain_runs_before_and_after_each_row() -> None:
    process = Answering("jackfield")
    numbers = turns(process, [SHORT, OTHER])
    assert process.asked == ["plain", "idle", "plain", "probe", "plain"]
    assert [(each["seconds"], each["plain_seconds"]) for each in numbers.times] == [
        (2.0, [1.0, 3.0]),
        (4.0, [3.0, 5.0]),
    ]


def test_long_prompts_are_held_against_long_prompts() -> None:
    process = Answering("jackfield")
    turns(process, [SHORT, LONG, OTHER])
    own = ["plain long", "pattern-long long", "plain long"]
    assert process.asked == ["plain", "idle", "plain", *own, "plain", "probe", "plain"]


def test_rounds_begin_elsewhere_and_the_first_do_not_count() -> None:
    numbers = turns(Answering("jackfield"), [SHORT, OTHER], rounds=2, warm_up=1)
    assert [(each["round"], each["row"]) for each in numbers.times] == [
        *((0, "idle"), (0, "probe")),
        *((1, "probe"), (1, "idle")),
    ]


def test_a_row_that_fails_is_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    process = Answering("jackfield", failing="probe")
    numbers = turns(process, [SHORT, OTHER], rounds=2)
    assert [each["row"] for each in numbers.times] == ["idle", "idle"]
    assert [(each["row"], each["failed"]) for each in numbers.failed] == [("probe", "it did not")]
    assert "probe, batch 1: it did not" in capsys.readouterr().err


def test_a_load_has_the_same_lengths_and_other_tokens() -> None:
    load = Load(requests=50, rate=10.0, prompt=(16, 2048), new=(16, 256))
    one, other = (drawn(load, range(100, 40000), seed=3) for _ in range(2))
    assert [(each.at_s, len(each.prompt), each.new) for each in one] == [
        (each.at_s, len(each.prompt), each.new) for each in other
    ]
    assert [each.prompt for each in one] != [each.prompt for each in other]
    assert all(16 <= len(each.prompt) <= 2048 and 16 <= each.new <= 256 for each in one)
    assert one == sorted(one, key=lambda each: each.at_s)


def test_names_of_rows_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
