"""The engines under test: a small model on each, prompts for it, and what it can do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import cast

import pytest
from torch import nn

import jackfield as jf
from jackfield.engines.fake import FakeEngine
from jackfield.engines.llama.engine import LlamaEngine
from tests import zoo
from tests.engines.tiny_tokenizers import words
from tests.engines.vllm import tiny


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on one engine. `raw` is the module below it, where raw places can be read.

    `holds`: how many prompts of a stream it draws before the first result. `read_only`: names that it does not edit.
    """

    name: str
    model: jf.Model
    raw: nn.Module | None = None
    holds: int = 5  # a batch of four, and one that did not fit
    read_only: frozenset[str] = frozenset()

    @property
    def prompts(self) -> list[list[int]]:
        """Three prompts of different lengths, for any vocabulary of 32."""
        return [[6, 20, 13, 28, 9, 17, 30], [11, 25, 8], [14, 22, 7, 31, 19]]


def _fake() -> Subject:
    return Subject("fake", jf.Model.over(FakeEngine(tokenizer=words(32), max_num_seqs=4)))


def _transformers(family: str) -> Subject:
    loaded = zoo.build(family, fresh=True)
    model = jf.Model(loaded, tokenizer=words(zoo.VOCAB), max_num_seqs=4)
    return Subject(f"transformers {family}", model, loaded)


def _llama() -> Subject:
    with TemporaryDirectory() as folder:
        zoo.build("llama").save_pretrained(folder)
        model = jf.Model(folder, engine="llama", tokenizer=words(zoo.VOCAB), max_batch_size=4, max_seq_len=256)
    return Subject("llama", model, cast(LlamaEngine, model._engine).model)


def _vllm() -> Subject:
    model = tiny.llama(max_num_seqs=4)
    return Subject("vllm", model, holds=8, read_only=frozenset({"attention_cached_keys", "attention_cached_values"}))


ENGINES: Mapping[str, Callable[[], Subject]] = MappingProxyType(
    {
        "fake": _fake,
        "transformers": lambda: _transformers("llama"),
        "transformers, learned positions": lambda: _transformers("gpt2"),
        "llama": _llama,
        "vllm": _vllm,
    }
)
"""Each builds its Subject when a test first asks for it."""

# vLLM's tests run in processes of their own.
MARKS: Mapping[str, pytest.MarkDecorator] = MappingProxyType({"vllm": pytest.mark.vllm})


@cache
def subject(name: str) -> Subject:
    return ENGINES[name]()


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in ENGINES])
def engine(request: pytest.FixtureRequest) -> Subject:
    return subject(request.param)


@pytest.fixture
def model(engine: Subject) -> jf.Model:
    return engine.model


@pytest.fixture
def fake() -> jf.Model:
    return subject("fake").model


@pytest.fixture
def editable(engine: Subject) -> Callable[[str], None]:
    """Skips a test of edits where this engine lets a value be read alone."""

    def check(name: str) -> None:
        if name in engine.read_only:
            pytest.skip(f"{name} can be read only")

    return check


@pytest.fixture
def prompt(engine: Subject) -> list[int]:
    return engine.prompts[0]


@pytest.fixture
def prompts(engine: Subject) -> list[list[int]]:
    return engine.prompts


@pytest.fixture
def raw(engine: Subject) -> nn.Module:
    if engine.raw is None:
        pytest.skip("this engine has no raw places")
    return engine.raw
