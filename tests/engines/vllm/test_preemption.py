"""Requests that lose their place in the cache, and are computed again: each block sees each position once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import jackfield as jf
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, engine_of, nothing_is_left, prompt_of, scheduler_of

pytestmark = pytest.mark.slow

Block = Callable[[jf.Model, Any], Any]


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    """Four blocks of 32 tokens for three prompts that need three each; what is computed again comes in chunks."""
    model = tiny.llama(
        max_model_len=96,
        num_gpu_blocks_override=5,
        max_num_batched_tokens=40,
        max_num_seqs=3,
        enable_prefix_caching=True,
    )
    with model:
        yield model


@contextmanager
def preempted(model: jf.Model) -> Iterator[list[str]]:
    """Which requests have been preempted."""
    scheduler, seen = scheduler_of(model), list[str]()
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = noted
    yield seen
    del scheduler._preempt_request


def reads(m: jf.Model, t: Any) -> Any:
    rows = []
    for _ in t.iter[:]:
        keys = m.layers[1].attention_cached_keys.sum()
        pattern = m.layers[2].attention_probabilities[:, :, -1].clone()
        rows.append((m.input_ids.tolist(), t.positions, keys, pattern, m.layers[3].layer_output.clone()))
    return rows


def steers(m: jf.Model, t: Any) -> Any:
    rows = []
    for step in t.iter[:]:
        m.layers[0].layer_output[:, -1, step % 64] += 4.0
        rows.append((t.positions, m.layers[3].layer_output.clone(), m.logits.clone()))
    return rows


def edits_keys(m: jf.Model, t: Any) -> Any:
    rows = []
    for _ in t.iter[:]:
        m.layers[1].attention_keys[:, :, 0] *= 1.5
        m.layers[1].attention_values[:, 0] += 0.5
        rows.append((m.layers[1].attention_cached_values.clone(), m.logits.clone()))
    return rows


def writes_nan(m: jf.Model, t: Any) -> Any:
    """Into keys that a pattern of its own passes over."""
    rows = []
    for step in t.iter[:]:
        if not step:
            m.layers[1].attention_keys[:, :, 3] = float("nan")
        there = m.layers[1].attention_cached_keys.isnan()
        pattern = torch.zeros_like(m.layers[1].attention_probabilities)
        pattern[..., 0] = 1.0
        m.layers[1].attention_probabilities = pattern
        rows.append((there, m.layers[3].layer_output.clone()))
    return rows


def edits_the_pattern(m: jf.Model, t: Any) -> Any:
    rows = []
    for _ in t.iter[:]:
        m.layers[2].attention_probabilities[:, 1] = 0.0
        m.layers[2].attention_output *= 1.1
        rows.append(m.layers[3].layer_output.clone())
    return rows


def skips(m: jf.Model, t: Any) -> Any:
    rows = []
    for _ in t.iter[:]:
        m.layers[1].skip()
        rows.append(m.layers[3].layer_output.clone())
    return rows


def ends_early(m: jf.Model, t: Any) -> Any:
    """What it wrote outlives it."""
    m.layers[0].attention_values[:, :, :] += 1.0
    return m.logits.clone()


@pytest.mark.parametrize("block", [reads, steers, edits_keys, writes_nan, edits_the_pattern, skips, ends_early])
def test_a_block_runs_once_per_position(model: jf.Model, block: Block) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((20, 24, 30))]
    alone = [model.run(prompt, block, max_tokens=60, ignore_eos=True) for prompt in prompts]
    with preempted(model) as seen:
        together = model.run(prompts, block, max_tokens=60, ignore_eos=True)
    assert seen
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        close(one.returned, other.returned)
    nothing_is_left(model)


def test_untraced_requests_are_preempted_first(model: jf.Model) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((20, 24))]
    plain = [model.run(prompt, max_tokens=60, ignore_eos=True).token_ids for prompt in prompts]
    alone = model.run(prompts[0], reads, max_tokens=60, ignore_eos=True)
    with preempted(model) as seen, model.trace(max_tokens=60, ignore_eos=True) as t:
        with t.invoke(prompts[1]):
            pass
        with t.invoke(prompts[0]):
            rows = reads(model, t).save()
    assert seen
    assert t.results[0].token_ids == plain[1]
    assert t.results[1].token_ids == alone.token_ids == plain[0]
    close(rows, alone.returned)


def test_edits_that_could_not_be_kept_end_their_request(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cache is not read: those that have edited nothing go on, their values are what they would have been."""
    worker = engine_of(model).llm.llm_engine.model_executor.driver_worker.worker
    monkeypatch.setattr(worker.jackfield, "_unkept", "model.layers.0: an odd cache")
    prompts = [prompt_of(length, seed) for seed, length in enumerate((20, 24, 30))]
    plain = [model.run(prompt, max_tokens=60, ignore_eos=True).token_ids for prompt in prompts]
    with preempted(model) as seen:
        found = model.run(prompts, reads, max_tokens=60, ignore_eos=True)
    assert seen
    assert [result.token_ids for result in found] == plain
    with pytest.raises((jf.Unavailable, ExceptionGroup), match=r"lost its place|blocks of 3 prompts failed"):
        model.run(prompts, steers, max_tokens=60, ignore_eos=True)
    nothing_is_left(model)
