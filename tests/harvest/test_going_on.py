"""A harvest that ended early goes on behind its last shard, with the same prompts and the same arguments alone."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import jackfield as jf
from jackfield.engines.fake import FakeEngine
from jackfield.harvest.folder import opened
from jackfield.harvest.manifest import NAME
from tests.harvest import killed
from tests.harvest.prompts import numbers, prompts

SITE = "layers.1.layer_output"
KEPT = [jf.Capture(SITE)]


def same(one: jf.Harvest, other: jf.Harvest) -> bool:
    """Whether two have the same rows, to a rounding: batches differ."""
    rows = [one.read(name).allclose(other.read(name), rtol=1e-4, atol=1e-5) for name in other.tensors]
    return all(rows) and (one.failed, one.prompts, one.tokens) == (other.failed, other.prompts, other.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "shards"), [("between prompts", {2, 3}), ("in a file", {2}), ("before the manifest", {2})]
)
def test_after_a_kill_nothing_is_lost_and_nothing_is_there_twice(out: Path, where: str, shards: set[int]) -> None:
    command = [sys.executable, "-m", "tests.harvest.killed", str(out), where]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    before = jf.Harvest(out)
    assert len(before) in shards
    assert not before.finished
    files = {entry.file: (out / entry.file).stat() for entry in before.shards}

    after = killed.model().harvest(iter(killed.given()), out, killed.CAPTURES, **killed.OPTIONS)
    whole = killed.model().harvest(killed.given(), out.with_name("whole"), killed.CAPTURES, **killed.OPTIONS)
    assert after.finished
    assert same(after, whole)
    runs = [number for number in range(killed.COUNT) if number % 10 != 4]
    assert after.read("prompt").unique_consecutive().tolist() == runs
    assert [failure.prompt for failure in after.failed] == list(range(4, killed.COUNT, 10))
    for file, was in files.items():
        assert ((out / file).stat().st_mtime_ns, (out / file).stat().st_ino) == (was.st_mtime_ns, was.st_ino)
    assert sorted(path.name for path in out.iterdir()) == sorted([NAME, *(entry.file for entry in after.shards)])


def cut_short(model: jf.Model, out: Path, **options: Any) -> None:
    """Ends in an error of the prompts' own, behind the second shard."""

    def stream() -> Any:
        yield from prompts(9)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.harvest(stream(), out, KEPT, **{"shard_prompts": 3, **options})


def test_an_error_of_the_prompts_own_is_raised_and_shards_stay(fake: jf.Model, out: Path) -> None:
    cut_short(fake, out)
    assert 0 < len(jf.Harvest(out)) <= 3
    whole = fake.harvest(prompts(9), out.with_name("whole"), KEPT, shard_prompts=3)
    assert same(fake.harvest(prompts(9), out, KEPT, shard_prompts=3), whole)


def test_only_what_is_not_done_is_run(fake: jf.Model, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[int] = []
    execute = FakeEngine.execute
    monkeypatch.setattr(FakeEngine, "execute", lambda *given: (run.append(len(given[1])), execute(*given))[1])
    fake.harvest(prompts(6), out, KEPT)
    assert sum(run) == 6
    again = fake.harvest(prompts(6), out, KEPT)
    assert (sum(run), again.finished, len(again)) == (6, True, 1)


def test_prompts_may_be_added_at_the_end(fake: jf.Model, out: Path) -> None:
    fake.harvest(prompts(6), out, KEPT)
    more = fake.harvest(prompts(10), out, KEPT)
    assert [entry.prompts for entry in more.shards] == [(0, 6), (6, 10)]
    assert same(more, fake.harvest(prompts(10), out.with_name("whole"), KEPT))


def test_shards_may_have_another_size(fake: jf.Model, out: Path) -> None:
    cut_short(fake, out)
    harvest = fake.harvest(prompts(9), out, KEPT, shard_mb=1e-6)
    assert len(harvest) > 4
    assert same(harvest, fake.harvest(prompts(9), out.with_name("whole"), KEPT))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interventions": [jf.Capture("layers.0.layer_output")]}, r"\[0\].site: 'layers.1.*there, 'layers.0"),
        ({"interventions": [jf.Capture(SITE, positions=[0, 1])]}, r"\[0\].positions: 'all' there, \[0, 1\] now"),
        ({"interventions": [*KEPT, jf.Capture("logits", positions="last")]}, "reduce"),
        ({"interventions": [jf.Scale(SITE, 0), *KEPT]}, r"interventions: \[.*'Capture'.* there, \[.*'Scale'.* now"),
        ({"dtype": "float16"}, "dtype: None there, 'float16' now. Ask for the same, and it goes on"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs: None there"),
    ],
)  # fmt: skip
def test_other_arguments_are_refused(fake: jf.Model, out: Path, arguments: dict[str, Any], message: str) -> None:
    fake.harvest(prompts(3), out, KEPT)
    before = (out / NAME).read_bytes()
    expected = jf.InvalidIntervention if message == "reduce" else jf.HarvestError
    with pytest.raises(expected, match=message):
        fake.harvest(prompts(3), out, **{"interventions": KEPT, **arguments})
    assert (out / NAME).read_bytes() == before


def test_another_model_is_refused(fake: jf.Model, out: Path) -> None:
    fake.harvest(prompts(3), out, KEPT)
    document = json.loads((out / NAME).read_text())
    document["asked"]["model"] |= {"name": "other", "hidden_size": 9}
    (out / NAME).write_text(json.dumps(document))
    with pytest.raises(jf.HarvestError, match=r"model.name: 'other' there, None now; .*hidden_size: 9 there, 8 now"):
        fake.harvest(prompts(3), out, KEPT)


@pytest.mark.parametrize("how", ["tensor", "shared", "name"])
def test_other_directions_are_refused_however_they_are_given(fake: jf.Model, out: Path, how: str) -> None:
    def probe(directions: torch.Tensor) -> jf.Probe:
        handle = fake.share(directions, name="probe")
        given: dict[str, Any] = {"tensor": directions, "shared": handle, "name": "probe"}
        return jf.Probe(SITE, given[how])

    fake.harvest(prompts(3), out, [probe(numbers(2, 8))])
    fake.harvest(prompts(3), out, [jf.Probe(SITE, numbers(2, 8))])
    with pytest.raises(jf.HarvestError, match=r"interventions\[0\].directions: 'float32 2x8 sha256:"):
        fake.harvest(prompts(3), out, [probe(numbers(2, 8, seed=1))])


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (prompts(6, seed=1), "of 6 prompts so far, and they are not the same"),
        ([*prompts(6)[:5], [7, 8]], "they are not the same"),
        (prompts(6)[::-1], "they are not the same"),
        (prompts(6)[:4], "only 4 prompts are given"),
    ],
    ids=["others", "another last", "another order", "fewer"],
)
def test_other_prompts_are_refused(fake: jf.Model, out: Path, now: Any, message: str) -> None:
    fake.harvest(prompts(6), out, KEPT)
    with pytest.raises(jf.HarvestError, match=message):
        fake.harvest(now, out, KEPT)


def test_two_at_once_are_refused(fake: jf.Model, out: Path) -> None:
    with opened(out), pytest.raises(jf.HarvestError, match="being harvested into by another process"):
        fake.harvest(prompts(3), out, KEPT)
    assert fake.harvest(prompts(3), out, KEPT).finished


def test_a_shard_that_is_gone_is_told(fake: jf.Model, out: Path) -> None:
    fake.harvest(prompts(6), out, KEPT, shard_prompts=2)
    shard = out / "harvest-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    for call in (lambda: jf.Harvest(out), lambda: fake.harvest(prompts(6), out, KEPT, shard_prompts=2)):
        with pytest.raises(
            jf.HarvestError, match=r"harvest-00001.safetensors is named by the manifest and cannot be read"
        ):
            call()
    shard.unlink()
    with pytest.raises(jf.HarvestError, match="Bring it back, or take another folder"):
        jf.Harvest(out)
