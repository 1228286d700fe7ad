"""vLLM with processes of its own, as it is started by default: the same, from outside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from tests.engines.tiny_tokenizers import words
from tests.engines.vllm import several_processes, tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.need_vllm()
    folder = tmp_path_factory.mktemp("model")
    zoo.build("llama", head_dim=32).save_pretrained(folder)
    words(zoo.VOCAB).save_pretrained(folder)
    return folder


def ran(folder: Path, *rest: str) -> Any:
    command = [sys.executable, "-m", several_processes.__name__, str(folder), *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, start_new_session=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def said(folder: Path) -> Iterator[Any]:
    return ran(folder)


def test_values_and_tokens_are_those_of_an_engine_in_this_process(said: Any, folder: Path) -> None:
    with tiny.start_folder(folder, num_gpu_blocks_override=40) as model:
        expected = several_processes.sums(model)
    for found in (said["sums"], said["again"]):
        for (tokens, streams), (other_tokens, other_streams) in zip(found, expected, strict=True):
            assert tokens == other_tokens
            assert streams == pytest.approx(other_streams, rel=1e-4)


def test_an_error_keeps_its_class_attributes_and_line(said: Any) -> None:
    assert said["failure"] == [1, 2, "raise OwnError(1, other=2)"]


def test_what_blocks_print_shows_in_the_caller(said: Any) -> None:
    """Once for each prompt, and in the order of the prompts, whatever the order in the batch."""
    one, other = (len(prompt) for prompt in several_processes.PROMPTS[:2])
    rows = [f"{count} rows in step {step}" for length in (one, other) for step, count in enumerate((length, 1))]
    assert said["printed"] == [*rows, "about to fail"]


def test_what_cannot_be_unpickled_is_its_own_error(said: Any) -> None:
    assert said["broken"] == "KeyError('not there')"


def test_no_row_comes_after_a_stop_string(said: Any) -> None:
    assert said["stopped"] == [3, [50, 51, 52], "t50t51", "stop"]


def test_large_results_come_whole(said: Any) -> None:
    assert said["mapped"]


def test_interrupts_end_requests_and_not_the_engine(said: Any) -> None:
    assert said["interrupted"] == ["block", "client"]
    assert said["held"] == dict.fromkeys(said["held"], 0)


def test_nothing_outlives_a_client_that_dies(folder: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    processes = ran(folder, "leave")
    assert processes
    until = time.monotonic() + 60
    while time.monotonic() < until and any(map(alive, processes)):
        time.sleep(0.2)
    assert not any(map(alive, processes))
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "jackfield" in name]


def alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # one that nobody has buried
