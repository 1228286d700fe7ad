"""Traces and runs in all their forms: prompts, invokes, sampling arguments, results."""

# `list().save()` is how a block makes a list to save.
# ruff: noqa: C408

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jackfield as jf
from tests.contract.conftest import Subject


def last_stream(m: jf.Model, t: Any) -> Any:
    """Saves the last layer's stream at each step, and returns how many there were."""
    rows = [m.layers[-1].layer_output for _ in t.iter[:]]
    t.save(rows=rows)
    return len(rows)


def test_trace_and_run_are_one(model: jf.Model, prompt: list[int]) -> None:
    result = model.run(prompt, last_stream, max_tokens=3, ignore_eos=True)
    with model.trace(prompt, max_tokens=3, ignore_eos=True) as t:
        rows = list().save()
        for _ in t.iter[:]:
            rows.append(model.layers[-1].layer_output)
    assert result.returned == len(rows) == 3
    assert t.result.token_ids == result.token_ids
    for row, other in zip(rows, result.saved["rows"], strict=True):
        assert row.equal(other)


def test_arun_is_run(model: jf.Model, prompt: list[int]) -> None:
    result = asyncio.run(model.arun(prompt, last_stream, max_tokens=2, ignore_eos=True))
    assert result.returned == 2
    assert result.token_ids == model.run(prompt, max_tokens=2, ignore_eos=True).token_ids


def test_a_run_without_a_block_generates(model: jf.Model, prompt: list[int]) -> None:
    result = model.run(prompt, max_tokens=3, ignore_eos=True)
    assert result.prompt_token_ids == prompt
    assert len(result.token_ids) == 3
    assert (result.finish_reason, result.saved, result.returned, result.error) == ("length", {}, None, None)


def test_one_token_is_the_default(model: jf.Model, prompt: list[int]) -> None:
    with model.trace(prompt) as t:
        token = model.logits.argmax().item()
        t.save(token=token)
    assert t.result.token_ids == [t.result.saved["token"]]


def test_text_gets_the_special_tokens(model: jf.Model) -> None:
    with model.trace("t7 t9 t8") as t:
        ids = model.input_ids.save()
        prompt, given = t.prompt, t.prompt_token_ids
        t.save(prompt=prompt, given=given)
    assert ids.tolist() == [[1, 7, 9, 8]]
    assert t.result.saved == {"ids": ids, "prompt": "t7 t9 t8", "given": (1, 7, 9, 8)}


def test_the_chat_template_adds_no_second_bos(model: jf.Model) -> None:
    with model.trace([{"role": "user", "content": "Hello"}]) as t:
        ids = model.input_ids.save()
    assert ids.tolist() == [[1, 3, 5, 4]]
    continued = model.run([{"role": "user", "content": "Hello"}], chat_template_kwargs={"add_generation_prompt": False})
    assert continued.prompt_token_ids == [1, 3, 5]
    assert t.result.prompt_token_ids == [1, 3, 5, 4]


def test_several_prompts_run_the_block_once_each(model: jf.Model, prompts: list[list[int]]) -> None:
    with model.trace(prompts, max_tokens=2, ignore_eos=True) as t:
        stream = model.layers[0].layer_input.save()
    assert [x.shape[1] for x in stream] == [len(prompt) for prompt in prompts]
    assert [result.prompt_token_ids for result in t.results] == prompts
    results = model.run(prompts, last_stream, max_tokens=2, ignore_eos=True)
    assert [result.returned for result in results] == [2, 2, 2]
    assert [result.token_ids for result in results] == [result.token_ids for result in t.results]


def test_a_list_of_one_prompt_is_several(model: jf.Model, prompt: list[int]) -> None:
    with model.trace([prompt]) as t:
        step = t.step
        step.save()
    assert step == [0]
    assert len(model.run([prompt])) == 1


def test_a_stream_of_prompts_has_bounded_memory(engine: Subject, prompt: list[int]) -> None:
    model = engine.model
    drawn, alive = 0, list[weakref.ref[jf.Result]]()

    def source() -> Iterator[list[int]]:
        nonlocal drawn
        for _ in range(13):
            drawn += 1
            yield prompt

    stream = model.run(source(), last_stream)
    assert drawn == 0
    for number, result in enumerate(stream):
        assert drawn <= number + engine.holds
        alive.append(weakref.ref(result.saved["rows"][0]))
        del result
    assert drawn == 13
    assert sum(reference() is not None for reference in alive) <= engine.holds


def test_invokes_have_bodies_of_their_own(model: jf.Model, prompts: list[list[int]]) -> None:
    order = []
    with model.trace(ignore_eos=True) as t:
        order.append("in place")
        with t.invoke(prompts[0], max_tokens=2):
            one = model.layers[0].layer_output.save()
        with t.invoke(prompts[1]):
            other = model.layers[0].layer_output.save()
            model.layers[0].layer_output = torch.zeros_like(other)
    assert order == ["in place"]
    assert (one.shape[1], other.shape[1]) == (len(prompts[0]), len(prompts[1]))
    assert [len(result.token_ids) for result in t.results] == [2, 1]
    assert t.results[0].token_ids == model.run(prompts[0], max_tokens=2, ignore_eos=True).token_ids


def test_invokes_in_a_loop(model: jf.Model, prompts: list[list[int]]) -> None:
    with model.trace() as t:
        for prompt in prompts:
            with t.invoke(prompt):
                ids = model.input_ids
                t.save(ids=ids)
    assert [result.saved["ids"].tolist() for result in t.results] == [[prompt] for prompt in prompts]


def test_a_trace_without_a_prompt_is_refused(model: jf.Model) -> None:
    with pytest.raises(jf.InvalidRequest, match=r"no prompt: give one to model\.trace"), model.trace():
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 5}, r"max_new_tokens is no sampling argument here: write max_tokens"),
        ({"temperatur": 0}, r"temperatur is no sampling argument\. Did you mean 'temperature'\?"),
        ({"max_tokens": 0}, r"max_tokens=0: it has to be a whole number, 1 or more"),
        ({"prompt_logprobs": 2}, r"prompt_logprobs=2: the \w+ engine cannot honour it"),
    ],
)
def test_sampling_arguments_are_refused_by_name(
    model: jf.Model, prompt: list[int], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(jf.InvalidRequest, match=message):
        model.run(prompt, **arguments)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "An empty list is no prompt"),
        ([5, 100_000], "Token id 100000 in the prompt"),
        ([5] * 1000, "make 1001, but the model holds"),
    ],
    ids=["empty", "outside the vocabulary", "too long"],
)
def test_prompts_are_refused_before_anything_runs(model: jf.Model, prompt: list[int], message: str) -> None:
    ran = []

    def block(m: jf.Model, t: Any) -> None:
        print(ran, m.logits)

    with pytest.raises(jf.InvalidRequest, match=message):
        model.run(prompt, block)


def test_a_result_is_not_there_inside(model: jf.Model, prompt: list[int]) -> None:
    trace = model.trace(prompt)
    with pytest.raises(jf.TracingError, match="no result yet"):
        _ = trace.result


def test_stop_ids_end_it(model: jf.Model, prompt: list[int]) -> None:
    plain = model.run(prompt, max_tokens=6, ignore_eos=True).token_ids
    result = model.run(prompt, max_tokens=6, ignore_eos=True, stop_token_ids=[plain[2]])
    assert result.finish_reason == "stop"
    assert result.token_ids == plain[: plain.index(plain[2]) + 1]


def test_print_shows_in_the_caller(model: jf.Model, prompt: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    with model.trace(prompt):
        print("rows", model.layers[0].layer_output.shape[1])
    assert capsys.readouterr().out == f"rows {len(prompt)}\n"


def test_a_trace_inside_a_block_is_refused(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        m.run([5, 6])

    with pytest.raises(jf.TracingError, match="cannot run inside a block"):
        model.run(prompt, block)
