"""What cannot be harvested is refused before anything runs; a prompt that cannot be run is named, and others go on."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import jackfield as jf
from tests.harvest.prompts import numbers, prompts

SITE = "layers.1.layer_output"
KEPT = [jf.Capture(SITE)]
V = numbers(2, 8)


@pytest.mark.parametrize(
    ("interventions", "message"),
    [
        ([], r'there is none: write \[jackfield.Capture\("layers'),
        ([jf.Scale(SITE, 0)], "A harvest is of what captures and probes keep, and there is none"),
        (jf.Capture(SITE), "write a list"),
        (SITE, "is no intervention"),
        ([jf.Capture(SITE), jf.Capture("layers.0.layer_output", positions="last")],
         "Capture at layers.0.layer_output has positions='last' and reduce=None, and Capture at layers.1.layer_output "
         "'prompt' and None"),
        ([jf.Capture(SITE), jf.Probe("layers.0.layer_output", V, reduce="mean")], "reduce='mean', and .*the same rows"),
        ([jf.Capture("layers.0.attention_probabilities")], "its rows are as wide as each prompt is long"),
        ([jf.Capture("logits")], "logits has one row a prompt; write positions='last'"),
        ([jf.Capture("logits", "mean")], "logits has one row a prompt"),
        ([jf.Capture("layers.9.layer_output")], "no layer 9"),
        ([jf.Probe(SITE, V, top_k=3)], "top_k=3 of 2 directions"),
        ([jf.Capture(SITE), jf.Probe(SITE, V)], "two interventions keep"),
    ],
)  # fmt: skip
def test_what_no_prompt_could_give(fake: jf.Model, out: Path, interventions: Any, message: str) -> None:
    with pytest.raises(jf.InvalidIntervention, match=message):
        fake.harvest(prompts(3), out, interventions)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float61"}, "dtype='float61': write float32.*Did you mean 'float64'"),
        ({"dtype": torch.int64}, "write float32, bfloat16, float16, float64, or None"),
        ({"shard_mb": 0}, "shard_mb=0: it has to be a number above 0"),
        ({"shard_prompts": 2.5}, "shard_prompts=2.5: it has to be a whole number above 0"),
        ({"prompts": 3}, "int is no prompt"),
        ({"prompts": [[3], "a", 3]}, "Prompt 2: int is no prompt"),
    ],
)
def test_arguments_that_are_none(fake: jf.Model, out: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(jf.InvalidRequest, match=message):
        fake.harvest(**{"prompts": prompts(3), "folder": out, "interventions": KEPT, **options})
    assert not out.exists()


def test_a_prompt_that_cannot_be_run_is_named_and_the_others_go_on(fake: jf.Model, out: Path) -> None:
    given: list[Any] = [[5, 6], [7] * 500, [], [99], 3, {"a": 1}, [6, 7, 8]]
    harvest = fake.harvest(iter(given), out, KEPT)
    assert harvest.read("prompt").tolist() == [0, 0, 6, 6, 6]
    assert (harvest.prompts, harvest.tokens, harvest.finished) == (7, 5, True)
    kinds = ["RequestTooLong", "InvalidRequest", "InvalidRequest", "InvalidRequest", "InvalidRequest"]
    assert [(failure.prompt, failure.error) for failure in harvest.failed] == list(zip(range(1, 6), kinds, strict=True))
    assert "500 prompt tokens" in harvest.failed[0].message


def test_a_prompt_without_the_position_is_named(fake: jf.Model, out: Path) -> None:
    harvest = fake.harvest([[5, 6], [7, 8, 9]], out, [jf.Capture(SITE, positions=[0, 2])])
    assert harvest.read("prompt").tolist() == [1, 1]
    assert harvest.read("positions").tolist() == [0, 2]
    (failure,) = harvest.failed
    assert (failure.prompt, failure.error) == (0, "InvalidIntervention")
    assert "position 2 is never reached" in failure.message


def test_an_error_while_a_prompt_runs_is_its_own(fake: jf.Model, out: Path) -> None:
    def steer(x: torch.Tensor, **_: Any) -> torch.Tensor:
        if x.shape[1] == 3:
            raise ZeroDivisionError("inside")
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jackfield.interventions.rows.steer", steer)
        harvest = fake.harvest([[5, 6], [7, 8, 9]], out, [jf.Steer(SITE, V[0]), *KEPT])
    assert harvest.read("prompt").tolist() == [0, 0]
    assert [(each.prompt, each.error, each.message) for each in harvest.failed] == [(1, "ZeroDivisionError", "inside")]


def test_when_all_fail_there_are_no_shards(fake: jf.Model, out: Path) -> None:
    harvest = fake.harvest([[99], [98]], out, KEPT)
    assert (len(harvest), harvest.prompts, harvest.rows, len(harvest.failed)) == (0, 2, 0, 2)
    assert len(fake.harvest([[99], [98]], out, KEPT).failed) == 2
    with pytest.raises(jf.UnknownValue, match="it has no rows yet"):
        harvest.read(SITE)


def test_a_number_that_the_dtype_cannot_hold_is_no_infinity(fake: jf.Model, out: Path) -> None:
    large = [jf.Steer(SITE, torch.full((8,), 1e5), positions=[2]), *KEPT]
    harvest = fake.harvest([[5, 6, 7], [8, 9, 10, 11]], out, large, dtype="float16")
    assert [failure.error for failure in harvest.failed] == ["HarvestError"] * 2
    assert "is more than dtype='float16' holds" in harvest.failed[0].message
    assert fake.harvest([[5, 6, 7]], out.with_name("wide"), large, dtype="bfloat16").failed == ()


def test_rows_of_another_shape_than_asked_are_never_written(
    fake: jf.Model, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine's own way of probing might give, if it knew nothing of top_k."""
    monkeypatch.setattr("jackfield.interventions.kept.Largest.results", lambda self: {
        SITE: torch.zeros(3, 2), f"{SITE}.indices": torch.zeros(3, 1, dtype=torch.int64)
    })  # fmt: skip
    with pytest.raises(
        jf.HarvestError, match=r"came as torch.float32 \(3, 2\) of prompt 0, and 3 rows of float32 \(1,\)"
    ):
        fake.harvest([[5, 6, 7]], out, [jf.Probe(SITE, V, top_k=1)])


# -- folders


def test_a_folder_of_something_else(fake: jf.Model, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("all of it")
    with pytest.raises(
        jf.HarvestError, match=r"it holds 'thesis.txt' and no manifest.json. Give a folder that is empty"
    ):
        fake.harvest(prompts(3), out, KEPT)
    with pytest.raises(jf.HarvestError, match=r"holds no harvest: there is no manifest.json in it"):
        jf.Harvest(out)


def test_an_empty_folder_and_what_a_kill_left(fake: jf.Model, out: Path) -> None:
    out.mkdir()
    (out / "manifest.json.partial").write_text("{")
    assert fake.harvest(prompts(3), out, KEPT).finished


@pytest.mark.parametrize("where", ["a file", "under a file", "nowhere to be made"])
def test_no_folder(fake: jf.Model, out: Path, where: str) -> None:
    out.write_text("")
    place = {"a file": out, "under a file": out / "deep", "nowhere to be made": Path("/proc/harvest")}[where]
    with pytest.raises(jf.HarvestError, match=r"cannot be a folder to harvest into: (File exists|Not a dir|No such)"):
        fake.harvest(prompts(3), place, KEPT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_ones_own(fake: jf.Model, out: Path) -> None:
    out.mkdir(mode=0o500)
    with pytest.raises(jf.HarvestError, match="cannot be written to: Permission denied"):
        fake.harvest(prompts(3), out, KEPT)


def test_a_file_that_cannot_grow(fake: jf.Model, out: Path) -> None:
    """The kernel's own error, in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))
    try:
        with pytest.raises(jf.HarvestError, match="cannot be written to: File too large"):
            fake.harvest(prompts(60), out, KEPT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in out.iterdir()] == ["manifest.json"]
    assert fake.harvest(prompts(60), out, KEPT).finished


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "manifest.json cannot be read: JSONDecodeError"),
        ("[]", "manifest.json cannot be read"),
        ('{"format": 2}', "is of format 2, and this version of jackfield reads format 1"),
        ('{"format": 1, "asked": {}}', "is no manifest of a harvest: KeyError"),
    ],
)
def test_a_manifest_that_is_none(fake: jf.Model, out: Path, text: str, message: str) -> None:
    out.mkdir()
    (out / "manifest.json").write_text(text)
    for call in (lambda: jf.Harvest(out), lambda: fake.harvest(prompts(3), out, KEPT)):
        with pytest.raises(jf.HarvestError, match=message):
            call()
