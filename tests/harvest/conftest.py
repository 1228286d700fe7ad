"""The engines of the contract suite. vLLM is one of them where it is installed."""

import importlib.util
from pathlib import Path

import pytest

import jackfield as jf
from tests.contract.conftest import ENGINES, MARKS, Subject, subject

HERE = [name for name in ENGINES if name != "vllm" or importlib.util.find_spec("vllm") is not None]


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in HERE])
def engine(request: pytest.FixtureRequest) -> Subject:
    return subject(request.param)


@pytest.fixture
def model(engine: Subject) -> jf.Model:
    return engine.model


@pytest.fixture
def fake() -> jf.Model:
    return subject("fake").model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "activations"
