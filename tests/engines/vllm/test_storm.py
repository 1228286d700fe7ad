"""Two hundred requests of every kind, arriving at random in a tiny vLLM, each checked against itself alone.

Prompts begin alike, so that the prefix cache hits; the batch holds four requests and 48 tokens, so that long prompts
come in chunks; the cache holds eight blocks, so that requests are preempted.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

import jackfield as jf
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, nothing_is_left, prompt_of, scheduler_of

pytestmark = pytest.mark.slow

Block = Callable[[jf.Model, Any], Any]
REQUESTS, CLIENTS, ALONE = 200, 8, 48


class OwnError(Exception):
    """What a block raises."""


def reads(layer: int, step: int) -> Block:
    def block(m: jf.Model, t: Any) -> Any:
        rows = []
        for _ in t.iter[:]:
            pattern = m.layers[layer].attention_probabilities.clone()
            rows.append((t.positions, pattern, m.layers[layer].layer_output.clone(), m.logits.clone()))
        return rows

    return block


def steers(layer: int, step: int) -> Block:
    def block(m: jf.Model, t: Any) -> Any:
        rows = []
        for now in t.iter[:]:
            m.layers[layer].layer_output[:, -1, (step + now) % 64] += 4.0
            rows.append((t.positions, m.final_norm_output.clone()))
        return rows

    return block


def edits(layer: int, step: int) -> Block:
    def block(m: jf.Model, t: Any) -> Any:
        rows = []
        for _ in t.iter[:]:
            m.layers[layer].attention_keys[:, 0] *= 0.5
            m.layers[layer].attention_probabilities[:, 1] = 0.0
            m.layers[layer].mlp_output *= 1.2
            rows.append((m.layers[layer].layer_output.clone(), m.logits.clone()))
        return rows

    return block


def skips(layer: int, step: int) -> Block:
    def block(m: jf.Model, t: Any) -> Any:
        rows = []
        for _ in t.iter[:]:
            m.layers[layer].skip()
            rows.append(m.layers[3].layer_output.clone())
        return rows

    return block


def stops(layer: int, step: int) -> Block:
    def block(m: jf.Model, t: Any) -> Any:
        for now in t.iter[:]:
            row = m.layers[layer].layer_output.clone()
            if now == step:
                t.stop()
        return row

    return block


def fails(layer: int, step: int) -> Block:
    def block(m: jf.Model, t: Any) -> Any:
        for now in t.iter[:]:
            if now == step:
                raise OwnError(m.layers[layer].layer_output.shape)
        return now

    return block


def reads_once(layer: int, step: int) -> Block:
    def block(m: jf.Model, t: Any) -> Any:
        m.layers[layer].attention_values[:, :, 0] += 1.0
        return m.layers[layer].attention_head_outputs.clone()

    return block


BLOCKS: Sequence[Callable[[int, int], Block]] = (reads, steers, edits, skips, stops, fails, reads_once)


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, block (None: untraced) and length."""

    prompt: tuple[int, ...]
    block: Block | None
    max_tokens: int


def ask(drawn: random.Random) -> Ask:
    traced = drawn.random() < 0.6
    shared, own = prompt_of(40, drawn.randrange(3)), prompt_of(drawn.randint(1, 20), drawn.randrange(1000))
    prompt = [*shared[: drawn.choice((0, 34, 40))], *own]
    prompt = prompt[: 48 if traced else 70]
    block = drawn.choice(BLOCKS)(drawn.randrange(4), drawn.randrange(4)) if traced else None
    return Ask(tuple(prompt), block, drawn.randint(1, 24))


def answered(model: jf.Model, asked: Ask) -> jf.Result:
    """Its result; where its block has failed, that of a stream, which gives it before the error."""
    stream = model.run(iter([list(asked.prompt)]), asked.block, max_tokens=asked.max_tokens, ignore_eos=True)
    result = next(stream)
    try:
        next(stream, None)
    except OwnError:
        assert result.finish_reason == "error"
    return result


def same(found: jf.Result, alone: jf.Result) -> None:
    assert found.token_ids == alone.token_ids
    assert (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
    assert (type(found.error), str(found.error)) == (type(alone.error), str(alone.error))
    close(found.returned, alone.returned)


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    model = tiny.llama(
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=8,
        enable_prefix_caching=True,
    )
    with model:
        yield model


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_storm(model: jf.Model, seed: int) -> None:
    drawn = random.Random(seed)
    asks = [ask(drawn) for _ in range(ALONE)]
    alone = {asked: answered(model, asked) for asked in asks}
    scheduler, preempted = scheduler_of(model), list[str]()
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    def arrives(pair: tuple[Ask, float]) -> jf.Result:
        time.sleep(pair[1])
        return answered(model, pair[0])

    scheduler._preempt_request = noted
    order = [(drawn.choice(asks), drawn.random() * 0.01) for _ in range(REQUESTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(arrives, order))
    del scheduler._preempt_request
    for (asked, _), result in zip(order, found, strict=True):
        same(result, alone[asked])
    assert len(found) == REQUESTS
    assert preempted
    nothing_is_left(model)
