"""A harvest as a reader has it."""

from pathlib import Path

import pytest
import torch

import jackfield as jf
from jackfield.harvest.manifest import ShardEntry
from jackfield.harvest.stored import Stored
from tests.harvest.prompts import prompts

SITE = "layers.1.layer_output"


@pytest.fixture
def harvest(fake: jf.Model, out: Path) -> jf.Harvest:
    return fake.harvest(prompts(7), out, [jf.Capture(SITE)], shard_prompts=3)


def test_shards_come_in_the_order_of_the_prompts(harvest: jf.Harvest, out: Path) -> None:
    again = jf.Harvest(str(out))
    lengths = [len(ids) for ids in prompts(7)]
    assert again.shards == (
        ShardEntry("harvest-00000.safetensors", (0, 3), sum(lengths[:3])),
        ShardEntry("harvest-00001.safetensors", (3, 6), sum(lengths[3:6])),
        ShardEntry("harvest-00002.safetensors", (6, 7), lengths[6]),
    )
    assert [set(shard["prompt"].tolist()) for shard in again] == [{0, 1, 2}, {3, 4, 5}, {6}]
    assert again[-1][SITE].equal(list(again)[2][SITE])
    assert again.read(SITE).equal(torch.cat([shard[SITE] for shard in harvest]))
    assert again.tensors[SITE] == Stored("float32", (8,))
    assert (len(again), again.tokens, again.failed) == (3, sum(lengths), ())


def test_a_shard_is_read_where_it_is_used(harvest: jf.Harvest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are not asked for nothing is read."""
    (harvest.folder / "harvest-00002.safetensors").unlink()
    shards = iter(harvest)
    assert len(next(shards)["prompt"]) == harvest.shards[0].rows
    assert len(next(shards)["prompt"]) == harvest.shards[1].rows
    with pytest.raises(FileNotFoundError):
        next(shards)


def test_a_name_that_is_not_there(harvest: jf.Harvest) -> None:
    with pytest.raises(
        jf.UnknownValue, match=r"has no 'layers.1.layer_outptu'; it has .*Did you mean 'layers.1.layer_output'"
    ):
        harvest.read("layers.1.layer_outptu")


def test_how_it_looks(harvest: jf.Harvest, out: Path) -> None:
    assert repr(harvest) == f"<Harvest {str(out)!r}: 7 prompts, {harvest.rows} rows in 3 shards>"
