"""Requests beside each other, in a batch, in threads and in tasks: none sees or touches another. And nothing stays."""

import asyncio
import contextlib
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import jackfield as jf

OPERANDS = (
    "attention_queries_prerotary",
    "attention_keys_prerotary",
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_cached_keys",
    "attention_cached_values",
)
SEQUENCE = (
    *("layer_input", "attention_norm_output", *OPERANDS, "attention_scores", "attention_probabilities"),
    *("attention_head_outputs", "attention_premix", "attention_head_results", "attention_output", "layer_mid"),
    *("mlp_norm_output", "mlp_activations", "mlp_output", "layer_output"),
)


def everything(m: jf.Model, t: Any) -> Any:
    """Every value there is, by step."""
    steps = []
    for _ in t.iter[:]:
        found = {"token_embeddings": m.token_embeddings, "input_ids": m.input_ids, "positions": t.positions}
        for number, layer in enumerate(m.layers):
            reasons = m.support(number)
            found |= {f"{number} {name}": getattr(layer, name) for name in SEQUENCE if reasons[name] is None}
        found |= {"final_norm_output": m.final_norm_output, "logits": m.logits}
        steps.append(found)
    return steps


def close(one: Any, other: Any) -> None:
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_batch_equals_its_members_alone(model: jf.Model, prompts: list[list[int]]) -> None:
    together = model.run(prompts, everything, max_tokens=3, ignore_eos=True)
    for prompt, result in zip(prompts, together, strict=True):
        alone = model.run(prompt, everything, max_tokens=3, ignore_eos=True)
        assert result.token_ids == alone.token_ids
        close(result.returned, alone.returned)


def test_members_that_end_early_leave_the_others_alone(model: jf.Model, prompts: list[list[int]]) -> None:
    with model.trace(ignore_eos=True) as t:
        with t.invoke(prompts[1], max_tokens=1):
            everything(model, t)
        with t.invoke(prompts[0], max_tokens=4):
            steps = everything(model, t).save()
        with t.invoke(prompts[2], max_tokens=2):
            everything(model, t)
    assert [len(result.token_ids) for result in t.results] == [1, 4, 2]
    close(steps, model.run(prompts[0], everything, max_tokens=4, ignore_eos=True).returned)


WRITTEN = (
    *("layer_input", "attention_norm_output", "attention_queries", "attention_keys", "attention_values"),
    *("attention_cached_keys", "attention_scores", "attention_probabilities", "attention_head_outputs"),
    *("attention_premix", "attention_output", "layer_mid", "mlp_norm_output", "mlp_activations", "mlp_output"),
    "layer_output",
)


@pytest.mark.parametrize("name", WRITTEN)
def test_an_edit_never_touches_another_request(
    model: jf.Model, prompts: list[list[int]], name: str, editable: Callable[[str], None]
) -> None:
    """One edits, before and after those that read; these are as they are alone, and the edit as it is alone."""
    editable(name)
    if model.support(0)[name] is not None:
        pytest.skip(f"{name} is not available")

    def edits(m: jf.Model, t: Any) -> Any:
        streams = []
        for _ in t.iter[:]:
            x = getattr(m.layers[0], name)
            x[:, 0] = 1.5
            streams.append({"stream": m.layers[1].layer_output, "logits": m.logits})
        return streams

    def reads(m: jf.Model, t: Any) -> Any:
        return [{"stream": m.layers[1].layer_output, "logits": m.logits} for _ in t.iter[:]]

    with model.trace(max_tokens=2, ignore_eos=True) as t:
        with t.invoke(prompts[0]):
            one = edits(model, t).save()
        with t.invoke(prompts[1]):
            two = reads(model, t).save()
        with t.invoke(prompts[2]):
            three = edits(model, t).save()
        with t.invoke(prompts[0]):
            four = reads(model, t).save()
    blocks: tuple[Callable[..., Any], ...] = (edits, reads, edits, reads)
    for result, block, found in zip(t.results, blocks, (one, two, three, four), strict=True):
        alone = model.run(result.prompt_token_ids, block, max_tokens=2, ignore_eos=True)
        assert result.token_ids == alone.token_ids
        close(found, alone.returned)
    assert not one[0]["logits"].allclose(four[0]["logits"])


def test_threads_with_the_same_names(model: jf.Model, prompts: list[list[int]]) -> None:
    def trace(number: int) -> Any:
        prompt = prompts[number % 3]
        with model.trace(prompt, max_tokens=2, ignore_eos=True) as t:
            h = model.layers[1].layer_output.save()
            ids = model.input_ids.save() if number % 2 else t.prompt_token_ids.save()
        return h, torch.as_tensor(ids).flatten().tolist(), t.result.token_ids

    expected = [trace(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(trace, range(8)))
    for (h, ids, tokens), (other, other_ids, other_tokens) in zip(found, expected, strict=True):
        assert h.equal(other)
        assert (ids, tokens) == (other_ids, other_tokens)


def test_tasks_with_the_same_names(model: jf.Model, prompts: list[list[int]]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        h = m.layers[1].layer_output.save()
        t.save(ids=m.logits.argmax().item(), shape=h.shape)

    async def gather() -> list[jf.Result]:
        return await asyncio.gather(*(model.arun(prompts[number % 3], block) for number in range(8)))

    for number, result in enumerate(asyncio.run(gather())):
        assert result.prompt_token_ids == prompts[number % 3]
        assert result.saved["ids"] == result.token_ids[0]
        assert result.saved["shape"] == (1, len(prompts[number % 3]), model.hidden_size)


# -- memory


def tensors_alive() -> int:
    return sum(type(item) is torch.Tensor for item in gc.get_objects())


def reads(model: jf.Model, prompt: list[int]) -> None:
    with model.trace(prompt) as t:
        h = model.layers[0].layer_output.save()
        model.layers[0].layer_output += 1
        pattern = model.layers[1].attention_probabilities.save()
    assert h.shape[1] == pattern.shape[2] == len(t.result.prompt_token_ids)


def generates(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        return [m.layers[0].layer_output for _ in t.iter[:]]

    model.run(prompt, block, max_tokens=2, ignore_eos=True)


def fails(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        h = m.layers[0].layer_output
        raise ValueError(h.shape)

    with contextlib.suppress(ValueError):
        model.run(prompt, block)


def fails_in_a_body(model: jf.Model, prompt: list[int]) -> None:
    with contextlib.suppress(ValueError), model.trace(prompt):
        h = model.layers[0].layer_output.save()
        if h.shape[1]:
            raise ValueError(h.shape)


def fails_in_company(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        h = m.layers[0].layer_output
        raise ValueError(h.shape)

    with contextlib.suppress(ExceptionGroup):
        model.run([prompt, prompt[1:]], block, max_tokens=2)


def is_stopped_in_the_middle(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        h = m.layers[0].layer_output
        h.sum()
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        model.run(prompt, block)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trace",
    [reads, generates, fails, fails_in_a_body, fails_in_company, is_stopped_in_the_middle],
    ids=lambda trace: trace.__name__,
)
def test_nothing_is_left_of_a_trace(
    model: jf.Model, prompt: list[int], trace: Callable[[jf.Model, list[int]], None]
) -> None:
    """With the collector off: no cycle keeps a tensor alive."""
    for _ in range(3):
        trace(model, prompt)
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        for _ in range(50):
            trace(model, prompt)
        assert tensors_alive() == before
    finally:
        gc.enable()
