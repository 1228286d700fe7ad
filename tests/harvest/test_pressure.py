"""A slow disk slows the run: prompts wait, and memory does not grow."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import jackfield as jf
from jackfield.harvest import stored
from jackfield.harvest.writer import Writer
from tests.contract.conftest import Subject
from tests.harvest.prompts import prompts

COUNT, IN_A_SHARD = 40, 4


class Held:
    """Prompts that are counted, and a disk that waits to be let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn, self.go = 0, threading.Event()
        write = stored.write

        def slow(file: Any, tensors: Any) -> None:
            assert self.go.wait(60)
            write(file, tensors)

        monkeypatch.setattr(stored, "write", slow)

    def stream(self) -> Any:
        for ids in prompts(COUNT):
            self.drawn += 1
            yield ids

    def settled(self) -> int:
        """How many are drawn when no more are."""
        before, since = self.drawn, time.monotonic()
        while time.monotonic() - since < 0.3 or not before:
            time.sleep(0.01)
            if self.drawn != before:
                before, since = self.drawn, time.monotonic()
        return before


def drawn_while_the_disk_waits(model: jf.Model, out: Path, held: Held) -> int:
    found: list[jf.Harvest] = []

    def run() -> None:
        found.append(model.harvest(held.stream(), out, [jf.Capture("layers.0.layer_output")], shard_prompts=IN_A_SHARD))

    thread = threading.Thread(target=run)
    thread.start()
    drawn = held.settled()
    held.go.set()
    thread.join(60)
    assert (found[0].prompts, found[0].rows) == (COUNT, sum(map(len, prompts(COUNT))))
    return drawn


def test_no_more_is_drawn_than_two_shards_and_what_the_engine_holds(
    engine: Subject, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = drawn_while_the_disk_waits(engine.model, out, Held(monkeypatch))
    assert 2 * IN_A_SHARD <= drawn <= 2 * IN_A_SHARD + engine.holds


def test_a_writer_that_lets_its_caller_run_ahead_is_found(
    fake: jf.Model, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, end = Writer.wait, Writer.__exit__
    monkeypatch.setattr(Writer, "wait", lambda self: None)
    monkeypatch.setattr(Writer, "__exit__", lambda self, *error: (end(self, *error), waited(self))[0])
    assert drawn_while_the_disk_waits(fake, out, Held(monkeypatch)) == COUNT


def test_what_an_engine_maps_is_let_go_while_a_shard_fills(engine: Subject, out: Path) -> None:
    """A large result of vLLM is a mapped file: one for each prompt of a shard is more than a process may have open."""
    captures = [
        jf.Capture(f"layers.*.{name}") for name in ("attention_head_results", "layer_output", "mlp_activations")
    ]
    long = [[3 + (7 * number + place) % 28 for place in range(60)] for number in range(30)]
    if engine.name == "vllm":
        long = [ids * 4 for ids in long]
    opened: list[int] = []
    kept = engine.model.harvest(
        iter(long), out, captures, on_progress=lambda _: opened.append(len(os.listdir("/proc/self/fd")))
    )
    assert (len(kept), len(opened)) == (1, 30)
    assert max(opened) <= opened[0] + engine.holds + 5


def test_an_error_of_the_writer_ends_the_run(fake: jf.Model, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next shard, not at the end of the prompts."""
    held = Held(monkeypatch)

    def full(file: Any, tensors: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "write", full)
    with pytest.raises(
        jf.HarvestError, match=r"cannot be written to: No space left on device\..*the same call goes on"
    ):
        fake.harvest(held.stream(), out, [jf.Capture("layers.0.layer_output")], shard_prompts=IN_A_SHARD)
    assert held.drawn <= 3 * IN_A_SHARD + 5
    assert [path.name for path in out.iterdir()] == ["manifest.json"]
    monkeypatch.undo()
    assert fake.harvest(prompts(COUNT), out, [jf.Capture("layers.0.layer_output")]).finished
