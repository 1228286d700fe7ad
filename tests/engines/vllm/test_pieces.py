"""A pass through new graphs between attention ops: run once more without, which is what counts.

There are no graphs on a CPU: the pass runs twice as it comes, and what is said of it is what a GPU would be told.
"""

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.engines.vllm.seen import Tolerance
from tests import zoo
from tests.engines.vllm.tiny import need_vllm, start

pytestmark = pytest.mark.slow
PROMPTS = [[5, 7, 9, 11], [3, 2], [8, 8, 1, 4, 6]]
ARGUMENTS: Any = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Generator[jf.Model]:
    need_vllm()
    found = start(zoo.build("llama", hidden_size=128), num_gpu_blocks_override=64)
    yield found
    found.close()


def rows_of(model: jf.Model) -> Any:
    engine: Any = model._engine
    return engine.llm.llm_engine.model_executor.driver_worker.worker.jackfield.rows


def edits_and_reads(m: Any, t: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for step in t.iter[:]:
        m.layers[0].attention_keys[:] *= 1.5
        m.layers[1].layer_output[:, -1] += step + 1.0
        found.append(m.layers[2].layer_output.clone())
        found.append(m.logits.clone())
    return found


@pytest.fixture
def in_pieces(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every pass is one through new graphs; what is told of those that are not right."""
    told: list[str] = []
    rows = rows_of(model)
    for name in ("in_pieces", "unproven"):
        monkeypatch.setattr(rows, name, True)
    monkeypatch.setattr(rows, "distrust_pieces", lambda: told.append("distrusted"))
    return told


def test_it_gives_what_it_gives_once(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: edits that are made twice, or that the second time does not have, and blocks that run on in it."""
    once = model.run(PROMPTS, edits_and_reads, **ARGUMENTS)
    again = rows_of(model).stats.again
    for name in ("in_pieces", "unproven"):
        monkeypatch.setattr(rows_of(model), name, True)
    twice = model.run(PROMPTS, edits_and_reads, **ARGUMENTS)
    assert rows_of(model).stats.again - again >= ARGUMENTS["max_tokens"]
    for one, other in zip(once, twice, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(one.returned, other.returned)


def test_it_is_distrusted_where_the_two_differ_and_only_there(
    model: jf.Model, in_pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.run(PROMPTS, edits_and_reads, **ARGUMENTS)
    assert not in_pieces
    compared: list[int] = []

    def differ(self: Tolerance, left: Tensor, right: Tensor) -> bool:
        compared.append(len(left))
        return False

    monkeypatch.setattr(Tolerance, "same", differ)
    model.run(PROMPTS[0], edits_and_reads, max_tokens=1)
    assert in_pieces == ["distrusted"]
    assert compared == [len(PROMPTS[0])]
