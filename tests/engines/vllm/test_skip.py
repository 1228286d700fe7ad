"""Layers skipped by one request while others of the batch are not, against transformers with hooks that skip them."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jackfield as jf
from tests import zoo
from tests.engines.transformers.reading import tokens_of
from tests.engines.vllm.families import SEED, TIED, WIDE, Family, Running, by_transformers, running
from tests.reference.compare import assert_close
from tests.reference.families import blocks_of, family_of
from tests.reference.record import Step, record

pytestmark = pytest.mark.slow

STEPS = 4
LENGTH = 11  # of no prompt beside it
FAMILIES = (
    Family("llama"),  # two halves of a stream
    Family("gemma2", TIED),  # the same, with norms behind its sublayers
    Family("gpt2", {"n_embd": 128, "n_layer": 4}),  # the stream itself
    Family("cohere", TIED),  # the stream and something beside it, sublayers side by side
    Family("mixtral", WIDE),  # experts
    by_transformers("olmo2"),
)
SKIPPED = {"one": (1,), "several": (0, 2), "all but one": (0, 1, 3)}  # of four


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Generator[Running]:
    """One family at a time."""
    with running(request.param) as found:
        assert found.model.num_layers == 4
        yield found


def block(skipped: Sequence[int]) -> Any:
    """Skips in the request of `LENGTH` prompt tokens, and in no other; keeps every layer's stream, and the logits."""

    def skipping(model: jf.Model, t: Any) -> Any:
        is_skipping, steps = len(t.positions) == LENGTH, []
        for _ in t.iter[:]:
            streams = []
            for number, layer in enumerate(model.layers):
                if is_skipping and number in skipped:
                    layer.skip()
                streams.append(layer.layer_output)
            steps.append((streams, model.logits))
        return steps

    return skipping


@contextmanager
def skipped_by_hooks(family: Running, skipped: Sequence[int]) -> Iterator[None]:
    """transformers' model, whose blocks give what they were given."""
    blocks = blocks_of(family.hf, family_of(family.hf, family.family.zoo))
    with ExitStack() as stack:
        for number in skipped:
            stack.callback(blocks[number].register_forward_hook(_what_it_was_given, with_kwargs=True).remove)
        yield


def _what_it_was_given(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    stream = args[0] if args else kwargs["hidden_states"]
    return (stream, *output[1:]) if isinstance(output, tuple) else stream


@pytest.mark.parametrize("skipped", SKIPPED.values(), ids=list(SKIPPED))
def test_a_skip_in_company_is_that_of_a_raw_hook(family: Running, skipped: tuple[int, ...]) -> None:
    """Kills: a skip that is dropped, skips for the whole batch, hands on a half of the stream, or another's rows."""
    ids, name = zoo.prompt(family.family.zoo, LENGTH, seed=SEED), family.family.zoo
    with skipped_by_hooks(family, skipped):
        want = record(family.hf, name, ids, STEPS)
    first, second, _ = family.prompts
    prompts = [first, ids[0].tolist(), second]
    one, result, other = family.model.run(prompts, block(skipped), max_tokens=STEPS, ignore_eos=True)
    held(result, want)
    unskipped = record(family.hf, name, ids, 1)
    assert not want[0].layers[-1]["layer_output"].allclose(unskipped[0].layers[-1]["layer_output"])
    for beside, steps in zip((one, other), family.references, strict=False):
        held(beside, steps[:STEPS])


def held(result: Any, want: Sequence[Step]) -> None:
    """A request's tokens, streams and logits against the reference's."""
    assert result.token_ids == tokens_of(want)
    for (streams, logits), step in zip(result.returned, want, strict=True):
        close(logits, step.root["logits"], "logits", f"step {step.index}, ")
        for number, (stream, layer) in enumerate(zip(streams, step.layers, strict=True)):
            close(stream, layer["layer_output"], "layer_output", f"step {step.index}, layer {number}, ")


def close(got: Tensor, want: Tensor, name: str, where: str) -> None:
    assert got.dtype == torch.float32
    assert_close(got, want, name, where=where)
