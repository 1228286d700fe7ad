"""The same values where vLLM compiles its models: taps are carried along, and tell the same."""

from collections.abc import Generator

import pytest

from tests.engines.transformers.reading import tokens_of
from tests.engines.vllm.families import Family, Running, by_transformers, running

pytestmark = pytest.mark.slow

COMPILED = (Family("llama"), Family("gpt2", {"n_embd": 128}), by_transformers("olmo2"))


@pytest.fixture(scope="module", params=COMPILED, ids=str)
def family(request: pytest.FixtureRequest) -> Generator[Running]:
    """One compiled family at a time."""
    with running(request.param, enforce_eager=False) as found:
        yield found


def test_every_value_of_a_compiled_model(family: Running) -> None:
    """Kills: a tap that is compiled away, or that sees what a fusion has written over."""
    assert family.alone.token_ids == tokens_of(family.references[0])
    family.compare(family.alone.saved["steps"], family.references[0])


def test_every_value_of_a_compiled_model_in_company(family: Running) -> None:
    """Kills: a graph that was traced for one shape of batch."""
    for result, steps in zip(family.company, family.references, strict=True):
        assert result.token_ids == tokens_of(steps)
        family.compare(result.saved["steps"], steps)
