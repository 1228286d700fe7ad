"""Traced requests in vLLM's schedule: whole prompts, full reads of cached ones, and one row per token that is kept."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import jackfield as jf
from tests import zoo
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, engine_of, nothing_is_left, prompt_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    with tiny.llama(max_num_batched_tokens=64, num_gpu_blocks_override=40, enable_prefix_caching=True) as model:
        yield model


def steps(m: jf.Model, t: Any) -> Any:
    return [(t.positions, m.layers[3].layer_output.clone()) for _ in t.iter[:]]


def test_a_traced_prompt_runs_whole_beside_others(model: jf.Model) -> None:
    """Long prompts that come in chunks, and requests that generate, leave it room."""
    prompt = prompt_of(60, 1)
    alone = model.run(prompt, steps, max_tokens=5, ignore_eos=True)
    plain = [model.run(prompt_of(120, seed), max_tokens=30, ignore_eos=True) for seed in range(2, 6)]
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(model.run, [prompt_of(120, seed) for seed in range(2, 6)], max_tokens=30, ignore_eos=True)
        found = model.run([prompt, prompt], steps, max_tokens=5, ignore_eos=True)
    for result in found:
        assert [list(positions) for positions, _ in result.returned] == [list(range(60)), [60], [61], [62], [63]]
        close(result.returned, alone.returned)
    assert [result.token_ids for result in others.result()] == [result.token_ids for result in plain]
    nothing_is_left(model)


def test_an_untraced_batch_meets_a_traced_prompt_midway(model: jf.Model) -> None:
    prompts = [prompt_of(100, seed) for seed in range(6)]
    plain = [model.run(prompt, max_tokens=40, ignore_eos=True).token_ids for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        many = pool.submit(model.run, prompts, max_tokens=40, ignore_eos=True)
        traced = [pool.submit(model.run, prompt_of(64, seed), steps, max_tokens=3) for seed in range(6)]
        assert [result.token_ids for result in many.result()] == plain
        for seed, future in enumerate(traced):
            close(future.result().returned, model.run(prompt_of(64, seed), steps, max_tokens=3).returned)


def test_a_prompt_that_cannot_run_whole_is_refused_before_any_runs(model: jf.Model) -> None:
    with pytest.raises(jf.RequestTooLong, match=r"65 prompt tokens with a block .* max_num_batched_tokens=64"):
        model.run([prompt_of(10, 0), prompt_of(65, 0)], steps)
    assert len(model.run(prompt_of(65, 0), max_tokens=2, ignore_eos=True).token_ids) == 2
    nothing_is_left(model)


def test_a_cached_prompt_is_read_whole(model: jf.Model) -> None:
    prompt = prompt_of(50, 7)
    plain = model.run(prompt, max_tokens=4, ignore_eos=True).token_ids
    assert model.run(prompt, max_tokens=4, ignore_eos=True).token_ids == plain
    read = model.run(prompt, steps, max_tokens=4, ignore_eos=True)
    assert read.returned[0][1].shape[1] == 50
    assert read.token_ids == plain


def test_no_edited_key_reaches_another_request(model: jf.Model) -> None:
    prompt = prompt_of(50, 8)

    def edits(m: jf.Model, t: Any) -> None:
        for layer in m.layers:
            layer.attention_keys *= 0.0

    edited = model.run(prompt, edits, max_tokens=4, ignore_eos=True).token_ids
    plain = model.run(prompt, max_tokens=4, ignore_eos=True).token_ids
    again = model.run(prompt, max_tokens=4, ignore_eos=True).token_ids
    assert plain == again != edited
    assert model.run(prompt, edits, max_tokens=4, ignore_eos=True).token_ids == edited
    other = tiny_reference(prompt)
    assert plain == other


def tiny_reference(prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers."""
    model = jf.Model(zoo.build("llama", head_dim=32), tokenizer=None)
    return model.run(prompt, max_tokens=4, ignore_eos=True).token_ids


def test_a_stop_string_ends_the_rows(model: jf.Model) -> None:
    def stops(m: jf.Model, t: Any) -> int:
        seen = 0
        for step in t.iter[:]:
            m.logits[..., 50 + step] = 1e4
            seen += 1
        return seen

    result = model.run(prompt_of(9, 3), stops, max_tokens=10, ignore_eos=True, stop="t52")
    assert (result.finish_reason, result.text, result.token_ids) == ("stop", "t50t51", [50, 51, 52])
    assert result.returned == 3


def test_a_token_that_ends(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> int:
        seen = 0
        for step in t.iter[:]:
            if step == 2:
                m.logits[..., 2] = 1e4
            seen += 1
        return seen

    prompt = prompt_of(9, 3)
    ended = model.run(prompt, block, max_tokens=6)
    assert (ended.returned, ended.finish_reason, len(ended.token_ids)) == (3, "stop", 3)
    going = model.run(prompt, block, max_tokens=6, ignore_eos=True)
    assert (going.returned, going.finish_reason, going.token_ids[2]) == (6, "length", 2)


def test_a_stop_comes_before_min_tokens(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> None:
        for step in t.iter[:]:
            if step == 1:
                t.stop()

    result = model.run(prompt_of(9, 3), block, max_tokens=9, min_tokens=8)
    assert (result.finish_reason, len(result.token_ids)) == ("stopped", 2)


def test_threads_share_one_batch(model: jf.Model) -> None:
    engine = engine_of(model).llm.llm_engine
    prompts, taken, step = [prompt_of(20, seed) for seed in range(6)], list[int](), engine.step
    alone = [model.run(prompt, steps, max_tokens=20, ignore_eos=True) for prompt in prompts]

    def counted() -> Any:
        taken.append(1)
        return step()

    engine.step = counted
    try:
        with ThreadPoolExecutor(6) as pool:
            runs = [pool.submit(model.run, prompt, steps, max_tokens=20, ignore_eos=True) for prompt in prompts]
        for run, expected in zip(runs, alone, strict=True):
            assert run.result().token_ids == expected.token_ids
            close(run.result().returned, expected.returned)
    finally:
        del engine.step
    assert len(taken) < 6 * 20 * 0.7


def test_tasks_share_one_batch(model: jf.Model) -> None:
    """More than asyncio has threads for: all of them meet in the batch."""
    prompts, meeting, most = [prompt_of(10, seed) for seed in range(60)], engine_of(model)._driver, [0]

    async def watched(prompt: list[int]) -> Any:
        result = await model.arun(prompt, max_tokens=10, ignore_eos=True)
        most[0] = max(most[0], len(meeting._waiting))
        return result

    async def gather() -> Any:
        return await asyncio.gather(*map(watched, prompts))

    found = asyncio.run(gather())
    assert [len(result.token_ids) for result in found] == [10] * 60
    assert most[0] > 40
    nothing_is_left(model)


def test_who_is_ahead_under_asynchronous_scheduling() -> None:
    """A step whose token may be the last is waited for; one that only the length can end is not."""
    tiny.need_vllm()
    from jackfield.engines.vllm.scheduler import _is_ahead
    from jackfield.engines.vllm.shipping import KEY

    def request(placeholders: int, *, traced: bool = True, **params: Any) -> Any:
        usual = {"stop": [], "stop_token_ids": [], "ignore_eos": True, "extra_args": {KEY: ["a", b""]}}
        given = usual | params | ({} if traced else {"extra_args": None})
        return SimpleNamespace(num_output_placeholders=placeholders, sampling_params=SimpleNamespace(**given))

    assert not _is_ahead(request(1))
    assert _is_ahead(request(1, ignore_eos=False))
    assert _is_ahead(request(1, stop=["."]))
    assert _is_ahead(request(1, stop_token_ids=[7]))
    assert not _is_ahead(request(0, stop=["."]))
    assert not _is_ahead(request(1, traced=False, stop=["."]))
