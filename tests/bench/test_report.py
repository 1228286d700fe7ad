"""The tables, out of times that are made up."""

import pytest

from bench.report import BEGIN, END, Measured, tables, write, written


def seconds(case: float) -> list[float]:
    return [case, case, case]


def prompt(**own: float) -> dict[str, list[float]]:
    return {"transformers.forward": seconds(2.0), "transformers.generate": seconds(1.0)} | {
        name.replace("__", ".").replace("_", " "): seconds(time) for name, time in own.items()
    }


@pytest.fixture
def measured() -> Measured:
    thin = {"transformers.forward": seconds(0.007), "transformers.generate": seconds(0.009)}
    return Measured(
        seconds={
            "prompt": {
                "jackfield": prompt(jackfield__streams=1.02, jackfield__patterns=1.2, by_hand__streams=1.01),
                "nnsight": {
                    "transformers.forward": seconds(4.0),  # slower than jackfield's: never to be its baseline
                    "transformers.generate": seconds(2.0),
                    "nnsight.streams": seconds(4.4),
                },
            },
            "overhead": {
                "jackfield": thin
                | {"jackfield.untouched": seconds(0.008), "jackfield.reads": seconds(0.0104)}
                | {"by hand.reads": seconds(0.0114)},
                "nnsight": thin | {"nnsight.untouched": seconds(0.010), "nnsight.reads": seconds(0.0112)},
            },
        },
        memory=[
            {"job": "long", "case": "transformers.forward", "peak_bytes": 512_000_000, "kept_bytes": 400_000_000},
            {"job": "long", "case": "jackfield.layer", "peak_bytes": 104_700_000, "kept_bytes": 4_700_000},
        ],
        conditions={"processor": "an abacus"},
    )


def line(text: str, start: str) -> list[str]:
    (found,) = [each for each in text.splitlines() if each.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_ratios_are_of_the_same_process(measured):
    row = line(tables(measured), "256-token prompt, every layer's stream; of the forward")
    assert row == ["0.510 (0.510 to 0.510)", "0.505 (0.505 to 0.505)", "1.100 (1.100 to 1.100)", "–", "1.03", "yes"]


def test_a_target_that_is_missed_is_said(measured):
    row = line(tables(measured), "256-token prompt, every layer's pattern; of `generate`")
    assert (row[0], row[-2:]) == ("1.200 (1.200 to 1.200)", ["1.05", "**no**"])


def test_what_was_not_measured_is_no_number(measured):
    assert line(tables(measured), "32 tokens, nothing read; of `generate`") == ["–", "–", "–", "–", "1.01", "–"]


def test_added_milliseconds_are_held_to_half_of_nnsights(measured):
    text = tables(measured)
    untouched = line(text, "nothing read; over the forward")
    assert (untouched[0], untouched[2], untouched[-2:]) == (
        "1.00 (1.00 to 1.00)",
        "3.00 (3.00 to 3.00)",
        ["1.50", "yes"],
    )
    assert line(text, "24 reads; over the forward")[-2:] == ["2.10", "**no**"]
    assert line(text, "24 reads; over `generate`")[-2:] == ["–", "–"]


def test_a_read_is_a_24th_of_what_24_add_to_a_trace_without(measured):
    assert line(tables(measured), "µs a read")[:3] == ["100 (100 to 100)", "100 (100 to 100)", "50 (50 to 50)"]


def test_medians_are_in_milliseconds(measured):
    row = line(tables(measured), "256-token prompt, every layer's stream")
    assert row[:3] == ["1000.0 (1000.0 to 1000.0)", "2000.0 (2000.0 to 2000.0)", "1020.0 (1020.0 to 1020.0)"]


def test_memory_is_in_megabytes(measured):
    text = tables(measured)
    assert line(text, "1,024-token prompt, one layer's stream: peak")[:2] == ["512.0 / –", "104.7"]
    assert line(text, "1,024-token prompt, one layer's stream: kept")[:2] == ["–", "4.7"]


def test_every_table_is_rectangular(measured):
    for table in tables(measured).split("\n\n"):
        if table.startswith("|"):
            assert len({each.count("|") for each in table.splitlines()}) == 1


def test_tables_stand_between_the_markers(tmp_path, measured):
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{BEGIN}\n\nold\n\n{END}\n\nAfter.\n", encoding="utf-8")
    write(page, measured)
    once = page.read_text(encoding="utf-8")
    assert once.startswith("Before.\n\n")
    assert once.endswith("\n\nAfter.\n")
    assert "an abacus" in once
    assert "old" not in once
    write(page, measured)
    assert page.read_text(encoding="utf-8") == once


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_refused(page):
    with pytest.raises(ValueError, match="each once"):
        written(page, "tables")
