"""The tables of a session, out of times that are made up; and sessions that are put together."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.environments import ROOT
from bench.gpu.__main__ import peers
from bench.gpu.report import BEGIN, END, tables
from bench.gpu.rows import PEERS, ROWS
from bench.gpu.session import Numbers, merged
from bench.report import written


def time(who: str, row: str, batch: int, seconds: float, plain: tuple[float, float], round: int = 0) -> dict[str, Any]:
    return {"round": round, "who": who, "row": row, "batch": batch, "seconds": seconds, "plain_seconds": list(plain)}


def load(mode: str, seconds: float, per_token_s: list[float]) -> dict[str, Any]:
    return {"round": 0, "mode": mode, "seconds": seconds, "tokens": 1000, "per_token_s": per_token_s}


@pytest.fixture
def numbers() -> Numbers:
    gib = 2**30
    return Numbers(
        times=[
            time("jackfield", "idle", 1, 1.0, (0.9, 1.1)),
            time("jackfield", "idle", 1, 1.0, (1.1, 1.3), round=1),
            time("jackfield", "idle", 1, 2.0, (1.0, 1.0), round=2),
            time("jackfield", "probe", 64, 2.0, (1.0, 1.0)),
            time("nnsight", "probe", 64, 4.0, (1.2, 0.8)),
        ],
        mixed=[
            load("plain vLLM", 10.0, [0.01] * 98 + [0.5, 0.7]),
            load("idle", 12.5, [0.02] * 100),
            load("one-in-eight", 20.0, [0.03] * 100),
            load("steered", 10.0, [0.01] * 100),
        ],
        memory={
            "plain vLLM": {"started_bytes": 20 * gib, "worked_bytes": 21 * gib},
            "jackfield alone": {"started_bytes": 20 * gib + gib // 2, "worked_bytes": 23 * gib},
        },
        failed=[{"who": "jackfield", "row": "capture", "batch": 1, "failed": "ValueError: it did not"}],
        left_out={"hotwire": "its environment is not here"},
        conditions={
            **{"device": "an abacus", "jackfield": "0", "model": "m", "lengths": "l", "vLLM's options": "o"},
        },
    )


def line(text: str, *start: str) -> list[str]:
    (found,) = [each for each in text.splitlines() if each.startswith("| " + " | ".join(start) + " |")]
    return [cell.strip() for cell in found.strip("|").split("|")][len(start) :]


def test_a_part_is_the_mean_of_plain_before_and_after_over_the_time(numbers: Numbers) -> None:
    """Kills: the time over plain's, one neighbour alone, a mean for a median."""
    row = line(tables(numbers, new=64), "installed, nothing traced", "1")
    assert row == ["61", "1.000 (0.750 to 1.100)", "0.995", "yes", "–"]


def test_a_missed_target_is_said_and_a_peer_has_its_place(numbers: Numbers) -> None:
    row = line(tables(numbers, new=64), "8 directions read at every layer, every token", "64")
    assert row == ["4,096", "0.500 (0.500 to 0.500)", "0.95", "**no**", "0.250 (0.250 to 0.250)"]


def test_a_failed_row_stays_in_the_table(numbers: Numbers) -> None:
    text = tables(numbers, new=64)
    assert line(text, "one layer's stream to the host, every token, as data", "1")[1:4] == [
        "**failed**",
        "0.97",
        "**no**",
    ]
    assert "- jackfield, capture, batch 1: ValueError: it did not" in text
    assert "- hotwire: left out, its environment is not here" in text


def test_without_targets_nothing_is_held_against_them(numbers: Numbers) -> None:
    text = tables(numbers, new=64, targets=False)
    assert line(text, "8 directions read at every layer, every token", "64")[2:4] == ["–", "–"]


def test_the_mixed_load(numbers: Numbers) -> None:
    text = tables(numbers, new=64)
    assert line(text, "plain vLLM") == ["100", "–", "10.00", "700.00"]
    assert line(text, "jackfield, nothing traced") == ["80", "0.800 (0.800 to 0.800)", "20.00", "20.00"]


def test_memory_is_what_is_taken_beside_vllm(numbers: Numbers) -> None:
    text = tables(numbers, new=64)
    assert line(text, "started") == ["20.00", "20.50", "0.50", "yes"]
    assert line(text, "after the rows of the table") == ["21.00", "23.00", "2.00", "**no**"]


def test_the_page_has_the_places_of_the_tables() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written(page, "a table", BEGIN, END).count("a table") == 1
    assert written(page, "a table").count("a table") == 1  # the other bench's


def test_sessions_are_put_together(numbers: Numbers) -> None:
    other = dataclasses.replace(
        numbers, times=[time("hotwire", "idle", 1, 1.0, (1.0, 1.0))], mixed=[], failed=[], left_out={}
    )
    both = merged([numbers, other])
    assert [each["who"] for each in both.times] == ["jackfield"] * 4 + ["nnsight", "hotwire"]
    assert both.left_out == {}  # it has been timed


def test_sessions_of_two_machines_are_not(numbers: Numbers) -> None:
    other = dataclasses.replace(numbers, conditions={**numbers.conditions, "device": "another"})
    with pytest.raises(ValueError, match="device: another, and in another session an abacus"):
        merged([numbers, other])


def test_peers_are_left_out_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "hotwire-vllm").mkdir()
    present, missing = peers(["vLLM eager", "nnsight", "hotwire"], tmp_path)
    assert [(peer.name, folder) for peer, folder in present] == [
        ("vLLM eager", None),
        ("hotwire", tmp_path / "hotwire-vllm"),
    ]
    assert list(missing) == ["nnsight"]
    assert "there is no" in missing["nnsight"]
    assert "JACKFIELD_BENCH_PEERS" in peers(["nnsight"], None)[1]["nnsight"]


def test_peers_have_rows_of_the_table() -> None:
    assert {name for peer in PEERS for name in peer.rows} <= {row.name for row in ROWS}
