"""Several vLLMs in one process: whatever one of them ends by, those beside it go on."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jackfield as jf
from jackfield.engines.vllm.residents import Residents
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import prompt_of

PROMPT = prompt_of(9, 0)


class Client:
    """Of an engine in this process."""

    def __init__(self, ended: list["Client"]) -> None:
        self.ended = ended

    def shutdown(self) -> None:
        self.ended.append(self)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    monkeypatch.setattr("jackfield.engines.vllm.residents.foreign", lambda module, name: Client)
    return []


def llm(client: Any) -> Any:
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))


def test_the_last_that_leaves_ends_them_all(ended: list[Client]) -> None:
    residents, several = Residents(), [llm(Client(ended)) for _ in range(3)]
    for each in several:
        residents.settle(each)
    for each in several[:2]:
        residents.leave(each)
    assert ended == []
    residents.leave(several[2])
    assert ended == [each.llm_engine.engine_core for each in several]
    again = llm(Client(ended))
    residents.settle(again)
    residents.leave(again)
    assert len(ended) == 4


def test_one_with_processes_of_its_own_ends_at_once(ended: list[Client]) -> None:
    residents, here, apart = Residents(), llm(Client(ended)), llm(SimpleNamespace(shutdown=lambda: told.append(1)))
    told: list[int] = []
    for each in (here, apart):
        residents.settle(each)
    residents.leave(apart)
    assert (told, ended) == ([1], [])


@pytest.fixture(scope="module")
def first() -> Iterator[jf.Model]:
    with tiny.llama(num_gpu_blocks_override=40) as model:
        yield model


def stream(m: jf.Model, t: Any) -> Any:
    return m.layers[1].layer_output


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["closed", "dropped", "not armed"])
def test_an_engine_goes_on_when_one_beside_it_ends(first: jf.Model, ends: str) -> None:
    """Kills: shutting an engine down beside another, whose groups vLLM then takes down."""
    before = first.run(PROMPT, stream, max_tokens=3)
    if ends == "not armed":
        with pytest.raises(jf.UnknownValue, match="no layer 99"):
            tiny.llama(num_gpu_blocks_override=40, arm="layers.99.layer_output")
    else:
        second = tiny.llama(num_gpu_blocks_override=40)
        assert second.run(PROMPT, max_tokens=3).token_ids == before.token_ids
        if ends == "closed":
            second.close()
        del second
        gc.collect()
    after = first.run(PROMPT, stream, max_tokens=3)
    assert after.token_ids == before.token_ids
    assert torch.equal(after.returned, before.returned)
