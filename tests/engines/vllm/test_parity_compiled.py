"""The same values where vLLM compiles its models: taps are carried along, and tell the same."""

from collections.abc import Generator

import pytest

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
    family.compare_alone()


def test_every_value_of_a_compiled_model_in_company(family: Running) -> None:
    """Kills: a graph that was traced for one shape of batch."""
    family.compare_company()
