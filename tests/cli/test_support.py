"""`jackfield support`: the table of values, and errors on one line."""

import json
import subprocess
import sys

import pytest

import jackfield as jf


def test_json_has_every_value_of_the_contract(say, folder):
    rows = {row["name"]: row for row in json.loads(say("support", folder, "--json").out)}
    assert {value.name for value in jf.values()} <= set(rows)
    assert rows["layer_output"] == {
        "name": "layer_output",
        "on": "layer",
        "axes": ["1", "t", "h"],
        "access": "rw",
        "available": True,
        "reason": None,
    }
    assert not rows["router_logits"]["available"]
    assert "router" in rows["router_logits"]["reason"]


def test_table_gives_reasons(say, folder):
    said = say("support", folder, "--layer", "1")
    assert "layer_output" in said.out
    assert "[1, t, h]" in said.out
    assert "no: " in said.out


def test_an_unknown_model_is_one_line_and_status_1(say, tmp_path):
    said = say("support", tmp_path / "nothing-here")
    assert (said.status, said.out) == (1, "")
    assert said.err.startswith("jackfield: ")
    assert said.err.count("\n") == 1
    assert "nothing-here" in said.err


def test_an_unknown_layer_is_status_2(say, folder):
    assert say("support", folder, "--layer", "9").status == 2


@pytest.mark.slow
def test_python_m_jackfield_is_the_same_command():
    said = subprocess.run([sys.executable, "-m", "jackfield", "--help"], capture_output=True, text=True, check=True)
    for command in ("look", "generate", "support"):
        assert command in said.stdout
