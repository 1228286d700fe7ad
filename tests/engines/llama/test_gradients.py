"""Gradients through the named values, against central differences of edits, in float64."""

import contextlib
from collections.abc import Callable
from typing import Any  # what a block returns

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.engines.llama import layers
from jackfield.engines.llama.layers import Attention, half_split, interleaved
from tests import zoo
from tests.engines.llama.test_engine import native, saved

WRITTEN = [value.name for value in jf.values() if value.access == "rw" and value.name != "router_logits"]
PROMPT = zoo.prompt("llama", 7)[0].tolist()
STEP = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> jf.Model:
    return native(saved(tmp_path_factory.mktemp("llama")), dtype=torch.float64)


def part(m: jf.Model, name: str) -> Any:
    on = next(value.on for value in jf.values() if value.name == name)
    return m if on == "model" else m.layers[1]


def weights(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def loss_of(m: jf.Model) -> Tensor:
    return (m.logits[0, 0] * weights(m.vocab_size)).sum()


def direction(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(6), dtype=like.dtype)


def difference(model: jf.Model, name: str, read: int, asked: int) -> float:
    """d loss / d value along a direction, from two runs in which the value is edited in its step."""

    def block(m: jf.Model, t: Any, by: float) -> Any:
        for step in t.iter[:]:
            if step == read:
                value = getattr(part(m, name), name)
                value += by * direction(value)
            if step == asked:
                loss = loss_of(m)
        return loss

    run = {"max_tokens": asked + 1, "ignore_eos": True}
    above, below = (model.run(PROMPT, lambda m, t, by=by: block(m, t, by), **run).returned for by in (STEP, -STEP))
    return float((above - below) / (2 * STEP))


def slope(model: jf.Model, name: str, read: int, asked: int) -> float:
    """The same from the gradient."""

    def block(m: jf.Model, t: Any) -> Any:
        for step in t.iter[:]:
            if step == read:
                value = getattr(part(m, name), name)
            if step == asked:
                gradient = t.gradient(loss_of(m), value)
        return (gradient * direction(gradient)).nan_to_num(0.0).sum()

    result = model.run(PROMPT, block, gradients=True, max_tokens=asked + 1, ignore_eos=True)
    return float(result.returned)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("step", [0, 1])
def test_gradients_are_finite_differences(model: jf.Model, name: str, step: int) -> None:
    expected = difference(model, name, step, step)
    assert abs(expected) > 1e-3
    assert slope(model, name, step, step) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["attention_keys", "attention_cached_values", "layer_input"])
def test_gradients_reach_earlier_steps_through_the_cache(model: jf.Model, name: str) -> None:
    expected = difference(model, name, 0, 2)
    assert abs(expected) > 1e-3
    assert slope(model, name, 0, 2) == pytest.approx(expected, rel=1e-6)


def a_cache_without_a_graph(patch: pytest.MonkeyPatch) -> None:
    right = Attention._remember

    def forgetful(self: Attention, name: str, rows: Tensor, start_pos: int) -> Tensor:
        self.graph.clear()
        return right(self, name, rows, start_pos)

    patch.setattr(Attention, "_remember", forgetful)


def a_softmax_without_a_graph(patch: pytest.MonkeyPatch) -> None:
    right = layers.attention_probabilities
    patch.setattr(layers, "attention_probabilities", lambda scores: right(scores.detach()) + 0 * scores.nan_to_num())


@pytest.mark.parametrize(
    ("mistake", "name", "asked"),
    [(a_cache_without_a_graph, "layer_input", 2), (a_softmax_without_a_graph, "attention_queries", 0)],
)
def test_a_mistake_shows(
    model: jf.Model,
    mistake: Callable[[pytest.MonkeyPatch], None],
    name: str,
    asked: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = difference(model, name, 0, asked)
    mistake(monkeypatch)
    with contextlib.suppress(jf.TracingError):  # that the loss does not depend on it shows the mistake too
        assert slope(model, name, 0, asked) != pytest.approx(expected, rel=1e-2)


def test_before_the_rotary_embedding_the_gradient_is_turned_back(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[1]
        reads = [layer.attention_queries_prerotary, layer.attention_keys_prerotary]
        reads += [layer.attention_queries, layer.attention_keys]
        return t.gradient(loss_of(m), reads)

    *before, queries, keys = model.run(PROMPT, block, gradients=True).returned
    turns = layers.precompute_freqs_cis(model.head_dim, len(PROMPT), 10000.0).conj()
    for found, after in zip(before, (queries, keys), strict=True):
        paired = interleaved(after.transpose(1, 2))
        expected = half_split(layers.apply_rotary_emb(paired, paired, turns)[0]).transpose(1, 2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
        assert not torch.allclose(found, after)


# What a block does with them.


def test_an_edit_in_the_graph_is_part_of_it(model: jf.Model) -> None:
    """After a scaling in place the gradient is that of what the model went on with."""

    def block(m: jf.Model, t: Any) -> Any:
        before = m.layers[1].layer_input
        whole = m.layers[1].layer_output
        whole[:, -1] *= 3.0
        return t.gradient(loss_of(m), [before, whole])

    def without(m: jf.Model, t: Any) -> Any:
        stream = m.layers[1].layer_output.clone()
        stream[:, -1] *= 3.0
        m.layers[1].layer_output = stream
        return t.gradient(loss_of(m), stream)

    _, found = model.run(PROMPT, block, gradients=True).returned
    torch.testing.assert_close(found, model.run(PROMPT, without, gradients=True).returned)


def test_attribution_patching_is_the_patch_to_first_order(model: jf.Model) -> None:
    """(other - own) times the gradient is what a small step towards the other run's stream does to the loss."""
    other = [*PROMPT[:-1], 9]
    streams = model.run(other, lambda m, t: [layer.layer_output for layer in m.layers]).returned

    def attributed(m: jf.Model, t: Any) -> Any:
        own = [layer.layer_output for layer in m.layers]
        loss = loss_of(m)
        gradients = t.gradient(loss, own)
        return [((b - a) * g).sum() for a, b, g in zip(own, streams, gradients, strict=True)]

    def patched(number: int, by: float) -> Tensor:
        def block(m: jf.Model, t: Any) -> Any:
            own = m.layers[number].layer_output
            own += by * (streams[number] - own)
            return loss_of(m)

        return model.run(PROMPT, block).returned

    for number, found in enumerate(model.run(PROMPT, attributed, gradients=True).returned):
        expected = (patched(number, STEP) - patched(number, -STEP)) / (2 * STEP)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_one_in_is_one_out_and_it_may_be_asked_again(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        stream, pattern = m.layers[0].layer_output, m.layers[1].attention_probabilities
        loss = loss_of(m)
        return t.gradient(loss, stream), t.gradient(loss, [pattern, stream]), t.gradient(2 * loss, (stream,))

    one, (pattern, two), (three,) = model.run(PROMPT, block, gradients=True).returned
    assert one.shape == (1, len(PROMPT), model.hidden_size)
    assert pattern.shape == (1, model.num_heads, len(PROMPT), len(PROMPT))
    assert one.equal(two)
    torch.testing.assert_close(three, 2 * one)


def test_what_is_kept_is_without_gradients(model: jf.Model) -> None:
    with model.trace(PROMPT, gradients=True) as t:
        stream = model.layers[0].layer_output.save()
        gradient = t.gradient(loss_of(model), stream).save()
        inside = (stream.requires_grad, gradient.requires_grad).save()
    assert inside == (True, False)
    assert not stream.requires_grad
    assert stream.grad_fn is None
    returned = model.run(PROMPT, lambda m, t: m.layers[0].layer_output, gradients=True).returned
    assert returned.equal(stream)
    assert not returned.requires_grad


def test_a_graph_is_not_kept_after_the_run(model: jf.Model) -> None:
    model.run(PROMPT, lambda m, t: m.logits, gradients=True, max_tokens=2)
    attentions = [module for module in model.layers[0].attention._module.modules() if isinstance(module, Attention)]
    assert all(not module.graph for module in attentions)
    assert not torch.is_grad_enabled() or model.layers[0].attention.cache_k.grad_fn is None


# Refusals.


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m, t, x: t.gradient(m.logits, x), r"The loss has shape \(1, 1, 128\); it has to be one number"),
        (lambda m, t, x: t.gradient(m.logits.sum().item(), x), "The loss is a float"),
        (lambda m, t, x: t.gradient(m.logits.detach().sum(), x), "The loss is not in the graph"),
        (lambda m, t, x: t.gradient(m.logits.sum(), [x, x.detach()]), r"values\[1\] is not in the graph"),
        (lambda m, t, x: t.gradient(m.logits.sum(), [x, "x"]), r"values\[1\] is a str"),
        (lambda m, t, x: t.gradient(x.sum(), m.logits), "The loss does not depend on the value: the loss was read"),
        (
            lambda m, t, x: t.gradient(m.logits.sum(), [x, x[:, -1]]),
            r"does not depend on values\[1\].*a part of a read",
        ),
    ],
)
def test_what_has_no_gradient(model: jf.Model, ask: Callable[..., Any], message: str) -> None:
    with pytest.raises(jf.TracingError, match=message):
        model.run(PROMPT, lambda m, t: ask(m, t, m.layers[0].layer_output), gradients=True)


def test_a_trace_without_gradients_says_how_to_have_them(model: jf.Model) -> None:
    with pytest.raises(jf.TracingError, match=r"write model\.trace\(prompt, gradients=True\)"):
        model.run(PROMPT, lambda m, t: t.gradient(m.logits.sum(), m.logits))
    with pytest.raises(jf.TracingError, match="only inside a block"):
        model.trace(PROMPT, gradients=True).gradient(1, 2)
