"""Cache blocks that come from a request with edits: nobody who gets them next can tell."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.engines.vllm.cleaning import Cached, Cleaning
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, engine_of, host_of, nothing_is_left, prompt_of
from tests.engines.vllm.test_preemption import preempted

NAN, INF = float("nan"), float("inf")
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((20, 3, 30))]
SAMPLING: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    """Four blocks of 32 tokens: whoever comes next gets them."""
    with tiny.llama(max_model_len=96, num_gpu_blocks_override=5, max_num_seqs=3) as model:
        yield model


def values(m: jf.Model, t: Any) -> None:
    m.layers[1].attention_values[:] = NAN


def stream(m: jf.Model, t: Any) -> None:
    m.layers[0].layer_output[:, 0] = INF


def decoding(m: jf.Model, t: Any) -> None:
    for step in t.iter[:]:
        if step == 2:
            m.layers[0].layer_output[:] = NAN


def fails(m: jf.Model, t: Any) -> None:
    m.layers[0].layer_output[:] = NAN
    m.layers[1].layer_output.sum()
    raise KeyError("of its own")


def stops(m: jf.Model, t: Any) -> None:
    m.layers[0].layer_output[:] = NAN
    t.stop()


def at_a_raw_place(m: jf.Model, t: Any) -> None:
    m.model.layers[0].mlp.output = torch.full_like(m.model.layers[0].mlp.output, NAN)


@pytest.mark.slow
@pytest.mark.parametrize("block", [values, stream, decoding, fails, stops, at_a_raw_place])
def test_the_next_request_is_as_if_there_had_been_no_edit(model: jf.Model, block: Any) -> None:
    plain = [model.run(prompt, **SAMPLING).token_ids for prompt in PROMPTS]
    for place, prompt in enumerate(PROMPTS):
        with suppress(KeyError):
            model.run(PROMPTS[0], block, **SAMPLING)
        assert model.run(prompt, **SAMPLING).token_ids == plain[place]
    nothing_is_left(model)


@pytest.mark.slow
def test_the_same_of_edits_out_of_tables(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model.run(PROMPTS[1], **SAMPLING).token_ids
    tables = host_of(model).tables
    assert tables is not None
    taken, take = list[bool](), tables.take
    monkeypatch.setattr(tables, "take", lambda *given: taken.append(take(*given)) or taken[-1])
    edits = [jf.Scale("layers.0.layer_output", 3e38)] * 2
    model.generate([PROMPTS[0]] * 4, edits, **SAMPLING)
    assert taken == [True] * 4
    for _ in range(4):
        assert model.run(PROMPTS[1], **SAMPLING).token_ids == plain


@pytest.mark.slow
def test_requests_that_only_read_leave_their_blocks_as_they_are(
    model: jf.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned, clean = list[Tensor](), Cached.clean
    monkeypatch.setattr(Cached, "clean", lambda self, blocks: cleaned.append(blocks) or clean(self, blocks))
    model.run(PROMPTS[0], lambda m, t: m.layers[1].layer_output.sum(), **SAMPLING)
    model.generate([PROMPTS[0]], [jf.Capture("layers.0.layer_output")])
    model.run(PROMPTS[0], **SAMPLING)
    assert not cleaned
    model.run(PROMPTS[0], values, **SAMPLING)
    model.run(PROMPTS[0], **SAMPLING)
    assert [len(blocks) for blocks in cleaned] == [1] * model.num_layers


@pytest.mark.slow
def test_others_in_the_batch(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        if len(t.prompt_token_ids) == len(PROMPTS[0]):
            m.layers[0].layer_output[:] = NAN
        return [m.layers[3].layer_output.clone() for _ in t.iter[:]]

    alone = [model.run(prompt, block, **SAMPLING) for prompt in PROMPTS[1:]]
    together = model.run(PROMPTS * 2, block, **SAMPLING)
    for one, other in zip(alone * 2, [together[place] for place in (1, 2, 4, 5)], strict=True):
        assert one.token_ids == other.token_ids
        close(one.returned, other.returned)


@pytest.mark.slow
def test_one_that_is_abandoned(model: jf.Model) -> None:
    plain = [model.run(prompt, **SAMPLING).token_ids for prompt in PROMPTS]
    for place, prompt in enumerate(PROMPTS):
        left = model.run(iter([PROMPTS[1], PROMPTS[0]]), values, max_tokens=1 + 20 * place, ignore_eos=True)
        next(left)
        left.close()
        assert model.run(prompt, **SAMPLING).token_ids == plain[place]
    assert not engine_of(model)._driver._waiting


@pytest.mark.slow
def test_one_that_is_preempted(model: jf.Model) -> None:
    """Its blocks are another's at once, and what it had is put back when it returns."""

    def block(m: jf.Model, t: Any) -> Any:
        if len(t.prompt_token_ids) == 21:
            m.layers[1].attention_values[:] = NAN
        return [m.layers[3].layer_output.clone() for _ in t.iter[:]]

    prompts = [prompt_of(length, seed) for seed, length in enumerate((20, 24, 21))]
    alone = [model.run(prompt, block, max_tokens=60, ignore_eos=True) for prompt in prompts]
    with preempted(model) as seen:
        together = model.run(prompts, block, max_tokens=60, ignore_eos=True)
    assert seen
    for one, other in zip(alone[:2], together[:2], strict=True):
        assert one.token_ids == other.token_ids
        close(one.returned, other.returned)
    nothing_is_left(model)


class Books:
    """A runner's, of requests with blocks of 4 tokens."""

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.blocks = blocks

    def group(self, layer: str) -> int:
        return 0

    def block_size(self, layer: str) -> int:
        return 4

    def held(self, layer: str, request_id: str, places: slice) -> Tensor:
        return torch.tensor(self.blocks.get(request_id, [])[places], dtype=torch.long)


def scheduled(computed: dict[str, int], *, finished: Iterable[str] = (), preempted: set[str] | None = None) -> Any:
    running = SimpleNamespace(req_ids=list(computed), num_computed_tokens=list(computed.values()))
    return SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        num_scheduled_tokens=dict.fromkeys(computed, 1),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=running,
    )


class Beside:
    """Two layers, the second with a window of 6, whose blocks hold ones; and what has been cleaned."""

    def __init__(self, blocks: dict[str, list[int]], edited: set[str]) -> None:
        self.caches = [SimpleNamespace(kv_cache=torch.ones(9, 2)), SimpleNamespace(kv_cache=torch.ones(2, 9))]
        layers = [Cached("0", self.caches[0], None, 0), Cached("1", self.caches[1], 6, 1)]
        self.edited, self.cleaning = edited, Cleaning(layers, cast("Any", Books(blocks)))

    def arrive(self, *given: Any, **named: Any) -> tuple[set[int], set[int]]:
        self.cleaning.arrive(scheduled(*given, **named), lambda _: True, self.edited.__contains__)
        found = [each.kv_cache.sum(axis) == 0 for each, axis in zip(self.caches, (1, 0), strict=True)]
        for each in self.caches:
            each.kv_cache.fill_(1)
        first, second = (set(cast("list[int]", each.nonzero().flatten().tolist())) for each in found)
        return first, second


def test_all_blocks_of_one_that_has_ended() -> None:
    beside = Beside({"a": [3, 5, 7], "b": [1, 2]}, {"a"})
    assert beside.arrive({"a": 0, "b": 0}) == (set(), set())
    assert beside.arrive({}, finished={"a", "b"}) == ({3, 5, 7}, {3, 5, 7})
    assert beside.arrive({}, finished={"a"}) == ({3, 5, 7}, {3, 5, 7})


def test_a_window_leaves_blocks_while_its_request_goes_on() -> None:
    """Each is cleaned once: after that it may be another request's."""
    beside = Beside({"a": [3, 5, 7]}, {"a"})
    assert beside.arrive({"a": 0}) == (set(), set())
    assert beside.arrive({"a": 8}) == (set(), set())
    assert beside.arrive({"a": 9}) == (set(), {3})
    assert beside.arrive({"a": 10}) == (set(), set())
    assert beside.arrive({}, finished={"a"}) == ({3, 5, 7}, {5, 7})


def test_a_preempted_request_has_no_blocks_until_it_returns() -> None:
    """Kills: a runner's old list of blocks taken for those of a request that ends while it waits."""
    beside = Beside({"a": [3, 5], "b": [1]}, {"a", "b"})
    beside.arrive({"a": 0, "b": 0})
    assert beside.arrive({"b": 4}, preempted={"a"}) == ({3, 5}, {3, 5})
    assert beside.arrive({"b": 5}, finished={"a"}) == (set(), set())
    assert beside.arrive({}, preempted={"b"})[0] == {1}
    beside.arrive({"b": 0})
    assert beside.arrive({}, finished={"b"})[0] == {1}
