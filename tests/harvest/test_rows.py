"""The rows that are harvested: what hooks see, each beside its own prompt, position and token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.harvest.row_axis import RowAxis
from jackfield.harvest.running import Run
from jackfield.harvest.shard import Shard
from jackfield.interventions import kept
from tests.contract.conftest import Subject, subject
from tests.harvest.prompts import hooked, numbers, prompts

MANY = prompts(10)
PARTS = {"transformers llama": "model.layers.{}", "transformers gpt2": "transformer.h.{}"}
SITES = "layers.*.layer_output"


def close(found: Tensor, expected: Tensor) -> bool:
    """To 1e-4 of each row's largest entry."""
    difference = (found - expected).abs().amax(-1)
    return found.shape == expected.shape and bool((difference <= 1e-4 * expected.abs().amax(-1) + 1e-7).all())


def streams(engine: Subject, layer: int) -> list[Tensor]:
    """The layer's output on each prompt alone: by hooks where there is a raw model, in a block where there is none."""
    if engine.name in PARTS:
        assert engine.raw is not None
        return [hooked(engine.raw, PARTS[engine.name].format(layer), ids) for ids in MANY]
    block: Callable[[Any, Any], Any] = lambda m, t: m.layers[layer].layer_output[0].cpu()  # noqa: E731
    return [engine.model.run(ids, block).returned for ids in MANY]


def harvested(engine: Subject, out: Path, *interventions: jf.Intervention, **options: Any) -> jf.Harvest:
    return engine.model.harvest(iter(MANY), out, interventions, **{"shard_prompts": 3, **options})


def test_every_token_of_every_prompt_has_its_row(engine: Subject, out: Path) -> None:
    harvest = harvested(engine, out, jf.Capture(SITES))
    assert (len(harvest), harvest.prompts, harvest.rows, harvest.finished) == (4, 10, sum(map(len, MANY)), True)
    assert harvest.read("token_ids").tolist() == [token for ids in MANY for token in ids]
    assert harvest.read("positions").tolist() == [place for ids in MANY for place in range(len(ids))]
    assert harvest.read("prompt").tolist() == [number for number, ids in enumerate(MANY) for _ in ids]
    for layer in range(engine.model.num_layers):
        assert close(harvest.read(f"layers.{layer}.layer_output"), torch.cat(streams(engine, layer)))


@pytest.mark.parametrize("last", [{"positions": "last"}, {"reduce": "last"}], ids=["position", "reduced"])
def test_the_last_token(engine: Subject, out: Path, last: dict[str, str]) -> None:
    harvest = harvested(engine, out, jf.Capture("layers.1.layer_output", **last))
    assert harvest.read("prompt").tolist() == list(range(10))
    assert harvest.read("positions").tolist() == [len(ids) - 1 for ids in MANY]
    assert harvest.read("token_ids").tolist() == [ids[-1] for ids in MANY]
    expected = torch.stack([rows[-1] for rows in streams(engine, 1)])
    assert close(harvest.read("layers.1.layer_output"), expected)


def test_the_mean_of_the_tokens(engine: Subject, out: Path) -> None:
    harvest = harvested(engine, out, jf.Capture("layers.1.layer_output", "mean", positions=range(1, 99)))
    assert harvest.read("prompt").tolist() == list(range(10))
    assert harvest.read("count").tolist() == [len(ids) - 1 for ids in MANY]
    assert set(harvest.tensors) == {"prompt", "count", "layers.1.layer_output"}
    expected = torch.stack([rows[1:].mean(0) for rows in streams(engine, 1)])
    assert close(harvest.read("layers.1.layer_output"), expected)


@pytest.mark.parametrize("reduce", [None, "last", "mean"])
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_probe(engine: Subject, out: Path, reduce: str | None, top_k: int | None) -> None:
    directions = numbers(5, engine.model.hidden_size)
    probe = jf.Probe("layers.1.layer_output", directions, 0.5, reduce=reduce, top_k=top_k)
    harvest = harvested(engine, out, probe)
    products = [rows @ directions.T + 0.5 for rows in streams(engine, 1)]
    reducing: dict[str | None, Callable[[Tensor], Tensor]] = {
        None: lambda x: x,
        "last": lambda x: x[-1:],
        "mean": lambda x: x.mean(0, keepdim=True),
    }
    expected = torch.cat([reducing[reduce](each) for each in products])
    found = harvest.read("layers.1.layer_output")
    if top_k is None:
        assert close(found, expected)
        return
    indices = harvest.read("layers.1.layer_output.indices")
    assert close(found, expected.sort(descending=True).values[:, :2])
    assert close(expected.gather(1, indices), found)


def test_edits_come_before_what_is_kept(engine: Subject, out: Path) -> None:
    vector = numbers(engine.model.hidden_size)
    harvest = harvested(engine, out, jf.Steer("layers.1.layer_output", vector), jf.Capture("layers.1.layer_output"))
    assert close(harvest.read("layers.1.layer_output"), torch.cat(streams(engine, 1)) + vector)


def test_heads_and_other_values(engine: Subject, out: Path) -> None:
    captures = [
        jf.Capture("layers.0.attention_head_outputs", positions="last", heads=[1]),
        jf.Capture("logits", positions="last"),
        jf.Capture("next_token_probabilities", positions="last"),
    ]
    harvest = harvested(engine, out, *captures)
    alone = [engine.model.generate(ids, captures)[0].saved for ids in MANY]
    for capture in captures:
        assert close(harvest.read(capture.site), torch.cat([saved[capture.site] for saved in alone]))
    assert harvest.tensors["layers.0.attention_head_outputs"].shape == (1, engine.model.head_dim)


def test_stored_in_another_dtype(fake: jf.Model, out: Path) -> None:
    kept_as = fake.harvest(MANY, out, [jf.Capture(SITES)], dtype="float16").read("layers.1.layer_output")
    whole = fake.harvest(MANY, out.with_name("whole"), [jf.Capture(SITES)]).read("layers.1.layer_output")
    assert kept_as.dtype == torch.float16
    assert kept_as.equal(whole.half())


def test_text_and_chats_are_prompts(fake: jf.Model, out: Path) -> None:
    given = ["t7 t8", [{"role": "user", "content": "t9"}], torch.tensor([6, 7])]
    harvest = fake.harvest(iter(given), out, [jf.Capture("layers.0.layer_output")])
    assert harvest.read("token_ids").tolist() == [1, 7, 8, 1, 3, 9, 4, 6, 7]
    assert fake.harvest("t7", out.with_name("one"), [jf.Capture("layers.0.layer_output")]).prompts == 1


def test_progress_is_told_after_each_prompt(fake: jf.Model, out: Path) -> None:
    told: list[Any] = []
    fake.harvest(MANY, out, [jf.Capture(SITES)], shard_prompts=3, on_progress=told.append)
    assert [tally.prompts for tally in told] == list(range(1, 11))
    assert [tally.shards for tally in told] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert told[-1].tokens == told[-1].rows == sum(map(len, MANY))


# -- mutants: each is a mistake that someone makes, and a test above finds it

COLUMNS, ADD, TAKE = RowAxis.columns, Shard.add, Run._take


def one_late(self: RowAxis, prompt: int, token_ids: Any) -> dict[str, Tensor]:
    columns = COLUMNS(self, prompt, token_ids)
    return {**columns, "token_ids": columns["token_ids"].roll(1)}


def newest_first(self: Shard, rows: Any) -> None:
    ADD(self, rows)
    self.tensors["layers.0.layer_output"].reverse()


def first_row(self: kept.LastRow, rows: Tensor) -> None:
    self._row = rows[0].clone()


class Smallest(kept.Largest):
    def add(self, rows: Tensor) -> None:
        values, indices = rows.topk(self._count, largest=False)
        self._values.add(values)
        self._indices.add(indices)


def uncounted(self: kept.MeanRow) -> Tensor:
    assert self._sum is not None
    return self._sum


MUTANTS: dict[str, tuple[Any, str, Any, Callable[[Subject, Path], None]]] = {
    "tokens one late": (RowAxis, "columns", one_late, test_every_token_of_every_prompt_has_its_row),
    "prompts backwards": (Shard, "add", newest_first, test_every_token_of_every_prompt_has_its_row),
    "the first for the last": (
        kept.LastRow, "add", first_row, lambda engine, out: test_the_last_token(engine, out, {"reduce": "last"})
    ),
    "a sum for a mean": (kept.MeanRow, "result", uncounted, test_the_mean_of_the_tokens),
    "the smallest": (
        kept.Largest, "add", Smallest.add, lambda engine, out: test_a_probe(engine, out, None, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(out: Path, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, test = MUTANTS[mutant]
    engine = subject("transformers")
    test(engine, out)
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        test(engine, out.with_name("mutant"))
