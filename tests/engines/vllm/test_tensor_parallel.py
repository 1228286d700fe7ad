"""Two ranks and four, each a process with its part of heads and neurons: values, edits and errors are those of one."""

import multiprocessing
import random
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jackfield as jf
from tests import zoo
from tests.engines.transformers.reading import tokens_of
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, engine_of
from tests.engines.vllm.families import SEED, Family, Running, running
from tests.reference.edits import edited_tokens

pytestmark = pytest.mark.slow

STEPS = 4
LAYER, HEAD, NEURON = 1, 3, 70  # of another rank than the first, by the model's numbers
ENGINES = ((Family("llama"), 2), (Family("falcon/7b"), 2), (Family("llama"), 4))
"""Grouped keys that are spread and a fused MLP; one key head that both ranks have, and a sum that comes late; key heads
that two ranks of four have, and sums that each rank makes in an order of its own.
"""


@pytest.fixture(scope="module", params=ENGINES, ids=lambda each: f"{each[0]}, {each[1]} ranks")
def family(request: pytest.FixtureRequest) -> Generator[Running]:
    """One engine at a time."""
    tiny.need_vllm()
    found, ranks = request.param
    with forked(), running(found, tensor_parallel_size=ranks, distributed_executor_backend="mp") as engine:
        yield engine


@contextmanager
def forked() -> Generator[None]:
    """On CPUs vLLM has each rank import everything anew, for half a minute; forked, as on GPUs, they have it already.

    Where torch has threads a fork of this process may hang: there it is left as it is.
    """
    executor: Any = import_module("vllm.v1.executor.multiproc_executor")
    with pytest.MonkeyPatch.context() as patch:
        if torch.get_num_threads() == 1:
            patch.setattr(executor, "get_mp_context", lambda: multiprocessing.get_context("fork"))
        yield


def only(family: Running, name: str) -> Running:
    """The family, where it is the one that a test is shown on."""
    if family.family.zoo != name:
        pytest.skip(f"shown on {name}")
    return family


# -- values


def test_every_value_of_a_prompt_alone(family: Running) -> None:
    """Kills: heads in another order, one rank's part that is served as the whole, an addend that is not summed."""
    family.compare_alone()


def test_every_value_in_company(family: Running) -> None:
    family.compare_company()
    nothing_is_left(family.model)


def test_the_model_is_described_as_it_is(family: Running) -> None:
    attention, config = family.model.layers[LAYER].attention, family.hf.config
    assert attention.num_heads == config.num_attention_heads
    assert attention.num_kv_heads == (1 if family.family.zoo == "falcon/7b" else config.num_key_value_heads)


def test_the_vocabulary_is_whole(family: Running) -> None:
    """Inside a block and out."""

    def block(m: jf.Model, t: Any) -> tuple[Tensor, Tensor, Tensor]:
        stream = m.layers[-1].layer_output
        return stream, m.project_on_vocab(stream[:, -1:]), m.logits

    stream, inside, logits = family.model.run(family.prompts[0], block).returned
    close(inside, logits)
    close(family.model.project_on_vocab(stream[:, -1:]), logits)


# -- edits


def one_head(m: jf.Model) -> None:
    layer = m.layers[LAYER]
    layer.write("attention_head_outputs", 0 * layer.read("attention_head_outputs", heads=[HEAD]), heads=[HEAD])


def heads_of_both_ranks(m: jf.Model) -> None:
    """In an order that is no rank's."""
    layer = m.layers[LAYER]
    turned = layer.read("attention_queries", heads=[3, 0]).flip(1)
    layer.write("attention_queries", turned, heads=[3, 0])


def one_neuron(m: jf.Model) -> None:
    m.layers[LAYER].mlp_activations[..., NEURON] = 2.0


def a_pattern(m: jf.Model) -> None:
    layer = m.layers[LAYER]
    pattern = layer.read("attention_probabilities", heads=[HEAD], queries=[-1])
    first = torch.eye(pattern.shape[-1])[:1].expand_as(pattern)
    layer.write("attention_probabilities", first, heads=[HEAD], queries=[-1])


def the_stream(m: jf.Model) -> None:
    m.layers[LAYER].layer_output[:, -1, ::2] *= -1.0


def _first_key(x: Tensor) -> Tensor:
    x[:, HEAD, -1] = torch.eye(x.shape[-1])[0]
    return x


def _zeroed(x: Tensor) -> Tensor:
    x[:, :, HEAD] = 0.0
    return x


def _turned(x: Tensor) -> Tensor:
    x[:, [3, 0]] = x[:, [0, 3]]
    return x


def _set(x: Tensor) -> Tensor:
    x[..., NEURON] = 2.0
    return x


def _negated(x: Tensor) -> Tensor:
    x[:, -1, ::2] *= -1.0
    return x


@pytest.mark.parametrize(
    ("edit", "value", "by_hook"),
    [
        (one_head, "attention_head_outputs", _zeroed),
        (heads_of_both_ranks, "attention_queries", _turned),
        (one_neuron, "mlp_activations", _set),
        (a_pattern, "attention_probabilities", _first_key),
        (the_stream, "layer_output", _negated),
    ],
    ids=["a head", "heads", "a neuron", "a pattern", "the stream"],
)
def test_an_edit_does_what_a_raw_hook_does(family: Running, edit: Any, value: str, by_hook: Any) -> None:
    """Kills: an edit that is not cut to the rank that has the head, or that falls on another rank's head."""
    ids, length = zoo.prompt(family.family.zoo, 11, seed=SEED), 11

    def block(m: jf.Model, t: Any) -> list[Tensor]:
        is_edited, logits = len(t.positions) == length, []
        for _ in t.iter[:]:
            if is_edited:
                edit(m)
            logits.append(m.logits)
        return logits

    want = edited_tokens(family.hf, family.family.zoo, ids, value, LAYER, by_hook, STEPS)
    plain = edited_tokens(family.hf, family.family.zoo, ids, value, LAYER, lambda x: x, STEPS)
    found = family.model.run([family.prompts[1], ids[0].tolist()], block, max_tokens=STEPS, ignore_eos=True)
    assert found[0].token_ids == tokens_of(family.references[1])[:STEPS]
    assert found[1].token_ids == want.token_ids
    logits = torch.cat([row[0] for row in found[1].returned])
    torch.testing.assert_close(logits, want.logits, rtol=1e-4, atol=1e-4 * float(want.logits.abs().max()))
    assert not torch.allclose(want.logits, plain.logits, rtol=1e-3), "the edit changes nothing, so nothing is shown"


# -- blocks


def test_random_numbers_are_the_same_on_every_rank(family: Running) -> None:
    """Each rank writes its heads; what enters the output projection is joined of both."""

    def block(m: jf.Model, t: Any) -> list[tuple[Tensor, Tensor]]:
        found = []
        for _ in t.iter[:]:
            heads = m.layers[LAYER].attention_head_outputs
            noise = torch.randn(heads.shape) * random.random() + float(np.random.rand())
            m.layers[LAYER].attention_head_outputs = noise
            found.append((noise, m.layers[LAYER].attention_premix))
        return found

    first, second = (family.model.run(family.prompts[0], block, max_tokens=2).returned for _ in range(2))
    for noise, premix in (*first, *second):
        assert premix.equal(noise)
    drawn = torch.stack([noise[0, 0] for noise, _ in (*first, *second)])
    assert len(drawn.unique()) == drawn.numel()


def test_ranks_sample_the_same_tokens_beside_a_block_that_draws(family: Running) -> None:
    """Kills: a block that draws from its rank's own numbers, from which each rank samples as well."""

    def block(m: jf.Model, t: Any) -> list[Tensor]:
        found = []
        for _ in t.iter[:]:
            torch.randn(_rank() + 1)
            found.append(m.token_embeddings[0, -1])
        return found

    result = family.model.run(family.prompts[0], block, max_tokens=6, temperature=1.0, ignore_eos=True)
    embedding = family.hf.get_input_embeddings()
    for row, token in zip(result.returned[1:], result.token_ids, strict=False):
        close(row, embedding(torch.tensor(token)).detach())


def test_a_module_that_a_block_calls_runs_on_all_ranks(family: Running) -> None:
    """With the sums between ranks that are in it."""
    only(family, "llama")

    def block(m: Any, t: Any) -> tuple[Tensor, Tensor]:
        given = m.model.layers[LAYER].mlp(m.layers[LAYER].mlp_norm_output[0])
        return given, m.layers[LAYER].mlp_output[0]

    given, output = family.model.run(family.prompts[0], block).returned
    close(given, output)


class OwnError(Exception):
    """Of a block of these tests'."""


def raises(m: jf.Model, t: Any) -> None:
    for step in t.iter[:]:
        m.layers[LAYER].attention_head_outputs.sum()
        if step == 1:
            raise OwnError("of its own")


def parts_ways_by_reading(m: jf.Model, t: Any) -> None:
    layer = m.layers[LAYER]
    for name in (("attention_keys", "attention_values"), ("attention_values", "attention_keys"))[_rank()]:
        getattr(layer, name).sum()


def parts_ways_by_waiting(m: jf.Model, t: Any) -> None:
    m.layers[LAYER + _rank()].mlp_activations.sum()


def parts_ways_by_ending(m: jf.Model, t: Any) -> None:
    m.layers[0].layer_output.sum()
    if _rank():
        m.layers[LAYER].mlp_activations.sum()


def _rank() -> int:
    return torch.distributed.get_rank()


APART = "does not do the same on all [24] ranks"


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (raises, OwnError, "of its own"),
        (parts_ways_by_reading, jf.TracingError, APART),
        (parts_ways_by_waiting, jf.TracingError, APART),
        (parts_ways_by_ending, jf.TracingError, APART),
    ],
    ids=["raises", "reads", "waits", "ends"],
)
def test_a_block_that_fails_ends_its_request_alone(
    family: Running, block: Any, error: type[Exception], message: str
) -> None:
    """Kills: ranks that wait for each other for ever, and a rank that goes on with what another has ended."""
    only(family, "llama")

    def neurons(m: jf.Model, t: Any) -> list[Tensor]:
        return [m.layers[LAYER].mlp_activations for _ in t.iter[:]]

    with ThreadPoolExecutor(1) as others:
        company = others.submit(family.model.run, family.prompts, neurons, max_tokens=STEPS, ignore_eos=True)
        with pytest.raises(error, match=message):
            family.model.run(family.prompts[0], block, max_tokens=STEPS, ignore_eos=True)
        results = company.result()
    for result, steps in zip(results, family.references, strict=True):
        assert result.token_ids == tokens_of(steps)[:STEPS]
        torch.testing.assert_close(
            result.returned[-1], steps[STEPS - 1].layers[LAYER]["mlp_activations"], rtol=2e-4, atol=2e-4
        )
    nothing_is_left(family.model)


# -- raw places


def test_raw_places_are_joined(family: Running) -> None:
    only(family, "llama")

    def joined(m: Any, t: Any) -> dict[str, Tensor]:
        layer, raw = m.layers[LAYER], m.model.layers[LAYER]
        qkv = raw.self_attn.qkv_proj.output
        found = {"qkv": qkv[0] if isinstance(qkv, tuple) else qkv}
        (q, k, v), _ = raw.self_attn.attn.inputs
        found["flat"] = torch.cat([q, k, v], 1)
        of_heads = (layer.attention_queries, layer.attention_keys, layer.attention_values)
        found["operands"] = torch.cat([each[0].transpose(0, 1).flatten(1) for each in of_heads], 1)
        found["heads"] = raw.self_attn.attn.output
        found["o"] = raw.self_attn.o_proj.input
        found["premix"] = layer.attention_premix[0].flatten(1)
        found["gate_up"] = raw.mlp.gate_up_proj.output[0]
        found["neurons"] = raw.mlp.down_proj.input
        return found

    found = family.model.run(family.prompts[0], joined).returned
    heads, kv_heads, width = 4, 2, 32
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    assert [piece.shape[1] for piece in found["qkv"].split(sizes, 1)] == sizes
    close(found["qkv"].split(sizes, 1)[2], found["operands"].split(sizes, 1)[2])
    close(found["flat"], found["operands"])
    close(found["heads"], found["premix"])
    close(found["o"], found["premix"])
    gate, up = found["gate_up"].chunk(2, 1)
    close(torch.nn.functional.silu(gate) * up, found["neurons"])


def test_an_edit_of_a_raw_place_is_cut_as_one_of_a_named_value_is(family: Running) -> None:
    only(family, "llama")

    def raw(m: Any, t: Any) -> list[Tensor]:
        rows = []
        for _ in t.iter[:]:
            m.model.layers[LAYER].self_attn.o_proj.input[:, 32 * HEAD :] = 0.0  # the last head
            m.model.layers[LAYER].mlp.down_proj.input[:, NEURON] = 2.0
            rows.append(m.layers[LAYER].layer_output)
        return rows

    def named(m: jf.Model, t: Any) -> list[Tensor]:
        rows = []
        for _ in t.iter[:]:
            m.layers[LAYER].attention_premix[:, :, HEAD] = 0.0
            m.layers[LAYER].mlp_activations[..., NEURON] = 2.0
            rows.append(m.layers[LAYER].layer_output)
        return rows

    one, other = (family.model.run(family.prompts[0], block, max_tokens=2).returned for block in (raw, named))
    close(one, other)


def test_a_part_is_not_served_for_the_whole(family: Running) -> None:
    only(family, "llama")

    def spread(m: Any, t: Any) -> None:
        m.model.layers[LAYER].mlp.act_fn.output.sum()

    with pytest.raises(jf.Unavailable, match=r"not the same on the [24] ranks"):
        family.model.run(family.prompts[0], spread)


def nothing_is_left(model: jf.Model) -> None:
    """On any rank."""
    held = dict(engine_of(model).held)
    assert held == dict.fromkeys(held, 0)
