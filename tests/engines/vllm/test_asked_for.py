"""What a request asks for beside its block: served, or refused in words of our own."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import jackfield as jf
from tests import zoo
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, engine_of, prompt_of

pytestmark = pytest.mark.slow

PROMPT = prompt_of(6, 1)
SAMPLING: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    with tiny.llama(num_gpu_blocks_override=40, skip_tokenizer_init=True) as model:
        yield model


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_text_without_a_tokenizer_is_refused(model: jf.Model, name: str) -> None:
    with pytest.raises(jf.InvalidRequest, match=f"{name} needs a tokenizer"):
        model.run(PROMPT, **{name: ["a"]})


@pytest.mark.parametrize("count", [-1, 40, 10 * zoo.VOCAB])
def test_any_number_of_logprobs(model: jf.Model, count: int) -> None:
    first = model.run(PROMPT, logprobs=count, **SAMPLING).logprobs
    assert first is not None
    assert {len(each) for each in first} <= ({zoo.VOCAB} if count != 40 else {40, 41})


def test_a_limit_of_the_callers_own_is_held(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_of(model).llm.llm_engine.model_config, "max_logprobs", 5)
    for count in (6, -1):
        with pytest.raises(jf.InvalidRequest, match=f"logprobs={count}: this model was loaded with max_logprobs=5"):
            model.run(PROMPT, logprobs=count)


def test_stop_tokens_that_never_come(model: jf.Model) -> None:
    plain = model.run(PROMPT, **SAMPLING).token_ids
    assert model.run(PROMPT, stop_token_ids=[zoo.VOCAB + 7], **SAMPLING).token_ids == plain
    assert model.run(PROMPT, stop_token_ids=[zoo.VOCAB, plain[0]], **SAMPLING).token_ids == plain[:1]


def test_a_block_that_stops_before_its_first_read(model: jf.Model) -> None:
    def reads(m: jf.Model, t: Any) -> Any:
        return m.layers[1].layer_output

    def stops(m: jf.Model, t: Any) -> Any:
        t.stop()
        return m.layers[1].layer_output

    found = model.run(PROMPT, stops, **SAMPLING)
    assert (found.finish_reason, len(found.token_ids)) == ("stopped", 1)
    close(found.returned, model.run(PROMPT, reads, **SAMPLING).returned)
    assert model.run(PROMPT, lambda m, t: t.stop(), **SAMPLING).finish_reason == "stopped"


def test_a_recursion_error_keeps_its_class(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> None:
        def deeper(depth: int) -> int:
            return deeper(depth + 1)

        m.layers[0].layer_output.sum()
        deeper(0)

    with pytest.raises(RecursionError) as caught:
        model.run(PROMPT, block, **SAMPLING)
    names = [frame.name for frame in caught.traceback]
    assert {"block", "deeper"} <= set(names)
    assert len(names) < sys.getrecursionlimit() / 2


def test_projections_in_any_mode(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        stream = m.layers[-1].layer_output
        plain = m.project_on_vocab(stream)
        with torch.device("meta"):
            on_meta = m.project_on_vocab(stream)
        return plain, on_meta

    plain, on_meta = model.run(PROMPT, block).returned
    assert on_meta.equal(plain)


def test_values_in_any_mode(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        return m.layers[1].attention_probabilities, m.layers[1].attention_head_results

    def on_meta(m: jf.Model, t: Any) -> Any:
        with torch.device("meta"):
            return block(m, t)

    def in_double(m: jf.Model, t: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return block(m, t)

    wanted = model.run(PROMPT, block).returned
    for other in (on_meta, in_double):
        found = model.run(PROMPT, other).returned
        assert all(one.equal(two) for one, two in zip(found, wanted, strict=True))
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3), r"takes \[..., 64\] of torch.float32; it was given torch.float32 \(3,\)"),
        (torch.zeros(64, dtype=torch.long), "it was given torch.int64"),
        (torch.zeros(64, dtype=torch.float64), "it was given torch.float64"),
        ([1.0], "it was given a list"),
    ],
)
def test_what_cannot_be_projected(model: jf.Model, given: Any, message: str) -> None:
    message = message.replace("64\\]", f"{model.hidden_size}\\]")
    with pytest.raises(jf.EditMismatch, match=message):
        model.project_on_vocab(given)
    with pytest.raises(jf.EditMismatch, match=message):
        model.run(PROMPT, lambda m, t: m.project_on_vocab(given))


def test_no_rows_are_projected_to_none(model: jf.Model) -> None:
    assert model.project_on_vocab(torch.zeros(2, 0, model.hidden_size)).shape == (2, 0, zoo.VOCAB)


def test_modes_around_a_read_do_nothing_to_others(model: jf.Model) -> None:
    """Kills: a FlopCounterMode, or vmap, that stays with the engine, whose edits are then lost, or which dies."""

    def edits(m: jf.Model, t: Any) -> Any:
        m.layers[1].layer_output[:] = 0
        return m.layers[2].layer_input.abs().max()

    def counts(m: jf.Model, t: Any) -> Any:
        with FlopCounterMode(display=False) as mode:
            m.layers[1].layer_output @ torch.ones(m.layers[2].layer_output.shape[-1], 2)
        return mode.get_total_flops()

    def maps(m: jf.Model, t: Any) -> Any:
        return torch.func.vmap(lambda i: m.layers[2].layer_output[0] * i)(torch.arange(2.0)).shape

    assert model.run(PROMPT, counts, **SAMPLING).returned > 0
    assert model.run(PROMPT, edits, **SAMPLING).returned == 0
    assert model.run(PROMPT, maps, **SAMPLING).returned == (2, len(PROMPT), model.hidden_size)
    assert model.run(PROMPT, edits, **SAMPLING).returned == 0
