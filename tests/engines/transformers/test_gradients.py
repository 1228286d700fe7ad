"""Gradients through the named values, against central differences of edits, in float64."""

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any  # what a block returns, and what torch's functions take

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import jackfield as jf
from jackfield.engines.transformers import graph
from jackfield.engines.transformers.beside import Beside
from jackfield.engines.transformers.engine import TransformersEngine
from tests import zoo

CASES = {
    "llama": ("llama", "sdpa"),
    "learned positions, one projection for all": ("gpt2", "sdpa"),
    "soft cap": ("gemma2", "eager"),
    "sinks": ("gpt_oss", "eager"),
    "window": ("mistral", "sdpa"),
    "a softmax of its own": ("bloom", "eager"),
    "activations that autograd saves": ("opt", "sdpa"),
}
LATENT = "latent attention"
WRITTEN = [value.name for value in jf.values() if value.access == "rw"]
STEP = 1e-5


class Wide(TorchFunctionMode):
    """What models and values compute in float32 is computed in float64, so that differences are exact."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def wide(item: Any) -> Any:
            return torch.float64 if item is torch.float32 else item

        func = Tensor.double if func is Tensor.float else func
        return func(*map(wide, args), **{name: wide(item) for name, item in (kwargs or {}).items()})


@contextmanager
def in_float64() -> Generator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def model_of(case: str) -> jf.Model:
    name, attention = CASES.get(case, ("deepseek_v3", "sdpa"))
    loaded = zoo.build(name, attention, torch.float64, fresh=True).requires_grad_(False)
    if name in ("gpt_oss", "deepseek_v3"):
        loaded.set_experts_implementation("eager")  # torch has no grouped product of float64
    return jf.Model(loaded)


@pytest.fixture
def model() -> jf.Model:
    return model_of("llama")


def prompt_of(case: str) -> list[int]:
    return zoo.prompt(CASES[case][0], 9)[0].tolist()


PROMPT = prompt_of("llama")


def part(m: jf.Model, name: str, layer: int) -> Any:
    on = next(value.on for value in jf.values() if value.name == name)
    return m if on == "model" else m.layers[layer]


def loss_of(m: jf.Model) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (m.logits[0, 0] * torch.randn(m.vocab_size, generator=generator, dtype=torch.float64)).sum()


def direction(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(6), dtype=like.dtype)


def difference(model: jf.Model, ids: list[int], name: str, layer: int, read: int = 0, asked: int = 0) -> float:
    """d loss / d value along a direction, from two runs in which the value is edited in its step."""

    def block(m: jf.Model, t: Any, by: float) -> Any:
        for step in t.iter[:]:
            if step == read:
                value = getattr(part(m, name, layer), name)
                value += by * direction(value)
            if step == asked:
                loss = loss_of(m)
        return loss

    run = {"max_tokens": asked + 1, "ignore_eos": True}
    with in_float64():
        above, below = (model.run(ids, lambda m, t, by=by: block(m, t, by), **run).returned for by in (STEP, -STEP))
    return float((above - below) / (2 * STEP))


def slope(model: jf.Model, ids: list[int], name: str, layer: int, read: int = 0, asked: int = 0) -> float:
    """The same from the gradient."""

    def block(m: jf.Model, t: Any) -> Any:
        for step in t.iter[:]:
            if step == read:
                value = getattr(part(m, name, layer), name)
            if step == asked:
                gradient = t.gradient(loss_of(m), value)
        return (gradient * direction(gradient)).nan_to_num(0.0).sum()

    with in_float64():
        return float(model.run(ids, block, gradients=True, max_tokens=asked + 1, ignore_eos=True).returned)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_finite_differences(case: str, name: str) -> None:
    model, ids = model_of(case), prompt_of(case)
    for layer in (0, model.num_layers - 1):
        reasons = {**model.support(), **model.support(layer)}
        if reasons[name] is not None:
            pytest.skip(reasons[name])
        expected = difference(model, ids, name, layer)
        assert slope(model, ids, name, layer) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("case", ["llama", "window", "a softmax of its own"])
@pytest.mark.parametrize("name", ["attention_keys", "attention_cached_values", "attention_scores", "layer_input"])
def test_gradients_reach_earlier_steps_through_the_cache(case: str, name: str) -> None:
    model, ids = model_of(case), prompt_of(case)
    expected = difference(model, ids, name, 1, 0, 2)
    assert abs(expected) > 1e-3
    assert slope(model, ids, name, 1, 0, 2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["attention_keys", "attention_scores", "attention_cached_values"])
def test_gradients_of_later_steps(name: str) -> None:
    model = model_of("llama")
    expected = difference(model, PROMPT, name, 1, 1, 1)
    assert abs(expected) > 1e-4
    assert slope(model, PROMPT, name, 1, 1, 1) == pytest.approx(expected, rel=1e-5)


# Mistakes that these tests see.


def a_pattern_without_a_graph(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Beside, "_taken", lambda self, new, rows: new[0].detach().clone())


def an_op_that_keeps_its_own_pattern(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Beside, "overwrite", lambda self, outputs: None)


@pytest.mark.parametrize("name", ["attention_scores", "attention_probabilities"])
@pytest.mark.parametrize("mistake", [a_pattern_without_a_graph, an_op_that_keeps_its_own_pattern])
def test_a_mistake_shows(
    mistake: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(jf.TracingError, match="does not depend on the value"):
        slope(model_of("llama"), PROMPT, name, 1)


def test_that_saved_tensors_are_copied_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT's activations are what its ReLU has saved; a read is written over them."""
    monkeypatch.setattr(graph, "_copies", lambda model: lambda tensor: tensor)
    model, ids = model_of("activations that autograd saves"), prompt_of("activations that autograd saves")

    def block(m: jf.Model, t: Any) -> Any:
        value = m.layers[0].mlp_norm_output
        m.layers[0].mlp_activations *= -1.0
        return t.gradient(loss_of(m), value)

    wrong = model.run(ids, block, gradients=True).returned
    monkeypatch.undo()
    right = model.run(ids, block, gradients=True).returned
    assert right.norm() > 1e-3
    assert not torch.allclose(wrong, right)


# Against the engine that is written out.


def test_gradients_are_those_of_the_llama_engine(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    ids = zoo.prompt("llama", 9)[0].tolist()
    names = [name for name in WRITTEN if name != "router_logits"]
    names += ["attention_queries_prerotary", "attention_keys_prerotary"]

    def block(name: str) -> Callable[[jf.Model, Any], Any]:
        def read(m: jf.Model, t: Any) -> Any:
            value = getattr(part(m, name, 1), name)
            return t.gradient((m.logits[0, 0] * torch.linspace(-1, 1, m.vocab_size)).sum(), value)

        return read

    theirs, ours = jf.Model(tmp_path, tokenizer=False), jf.Model(tmp_path, engine="llama", tokenizer=False)
    for name in names:
        found, expected = (m.run(ids, block(name), gradients=True).returned for m in (theirs, ours))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()), msg=name)


# What a block does with them.


def test_reads_of_everything_at_once_have_the_gradients_they_have_alone(model: jf.Model) -> None:
    names = [name for name in WRITTEN if name not in ("router_logits", "token_embeddings")]
    order = [name for name in names if part(model, name, 1) is not model]

    def alone(m: jf.Model, t: Any, name: str) -> Any:
        value = getattr(m.layers[1], name)
        return t.gradient(loss_of(m), value)

    def together(m: jf.Model, t: Any) -> Any:
        layer = m.layers[1]
        first = ["layer_input", "attention_norm_output"]
        later = ["attention_output", "layer_mid", "mlp_norm_output", "mlp_activations", "mlp_output", "layer_output"]
        inner = [name for name in order if name not in (*first, *later)]
        values = {name: getattr(layer, name) for name in (*first, *inner, *later)}
        return dict(zip(values, t.gradient(loss_of(m), list(values.values())), strict=True))

    found = model.run(PROMPT, together, gradients=True).returned
    for name in order:
        expected = model.run(PROMPT, lambda m, t, name=name: alone(m, t, name), gradients=True).returned
        if not name.startswith("attention_cached"):  # an edit of these keys is an edit of those
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_edits_in_place_and_assignments_are_in_the_graph(model: jf.Model) -> None:
    def in_place(m: jf.Model, t: Any) -> Any:
        before, pattern = m.layers[0].layer_input, m.layers[1].attention_probabilities
        pattern[:, 0] *= 0.5
        after = m.layers[1].layer_output
        after[:, -1] *= 3.0
        return t.gradient(loss_of(m), [before, pattern, after])

    def assigned(m: jf.Model, t: Any) -> Any:
        before, pattern = m.layers[0].layer_input, m.layers[1].attention_probabilities.clone()
        pattern[:, 0] *= 0.5
        m.layers[1].attention_probabilities = pattern
        after = m.layers[1].layer_output.clone()
        after[:, -1] *= 3.0
        m.layers[1].layer_output = after
        return t.gradient(loss_of(m), [before, pattern, after])

    def plain(m: jf.Model, t: Any) -> Any:
        before = m.layers[0].layer_input
        return t.gradient(loss_of(m), [before])

    one, two = (model.run(PROMPT, block, gradients=True).returned for block in (in_place, assigned))
    for found, expected in zip(one, two, strict=True):
        torch.testing.assert_close(found, expected)
    assert not torch.allclose(one[0], model.run(PROMPT, plain, gradients=True).returned[0])


def test_a_raw_place_is_in_the_graph(model: jf.Model) -> None:
    def raw(m: jf.Model, t: Any) -> Any:
        value = m.layers[1].mlp.output
        return t.gradient(loss_of(m), value)

    def named(m: jf.Model, t: Any) -> Any:
        value = m.layers[1].mlp_output
        return t.gradient(loss_of(m), value)

    found, expected = (model.run(PROMPT, block, gradients=True).returned for block in (raw, named))
    torch.testing.assert_close(found, expected)


def test_several_prompts_have_graphs_of_their_own(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        stream = m.layers[0].layer_output
        return t.gradient(loss_of(m), stream)

    prompts = [PROMPT, PROMPT[2:], PROMPT[:3]]
    for prompt, result in zip(prompts, model.run(prompts, block, gradients=True), strict=True):
        torch.testing.assert_close(result.returned, model.run(prompt, block, gradients=True).returned)


def test_latent_attention_has_gradients_on_the_prompt_and_says_why_not_on_several_steps() -> None:
    model, ids = model_of(LATENT), zoo.prompt("deepseek_v3", 9)[0].tolist()
    for name in ("attention_keys", "attention_values"):

        def moved(by: float, name: str = name) -> float:
            def block(m: jf.Model, t: Any) -> Any:
                attention = m.layers[1]
                value = getattr(attention, name)
                value += by * direction(value)
                return loss_of(m)

            with in_float64():
                return float(model.run(ids, block, gradients=True).returned)

        expected = (moved(STEP) - moved(-STEP)) / (2 * STEP)
        assert slope(model, ids, name, 1) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(jf.Unavailable, match=f"{name} has no gradients over several steps, since the cache"):
            slope(model, ids, name, 1, 0, 1)


# What is left.


def test_what_is_kept_is_without_gradients_and_no_graph_is_left(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        stream, pattern = m.layers[0].layer_output, m.layers[1].attention_probabilities
        loss = loss_of(m)
        t.save(stream=stream, pattern=pattern, live=_graph_tensors())
        return t.gradient(loss, [stream, pattern]), loss

    before = torch.is_grad_enabled()
    gc.collect()
    live = _graph_tensors()
    gc.disable()
    try:
        result = model.run(PROMPT, block, gradients=True, max_tokens=2)
        assert _graph_tensors() == live
    finally:
        gc.enable()
    gradients, loss = result.returned
    assert result.saved["live"] > live
    for tensor in (*gradients, loss, result.saved["stream"], result.saved["pattern"]):
        assert not tensor.requires_grad
        assert tensor.grad_fn is None
    assert torch.is_grad_enabled() == before


def _graph_tensors() -> int:
    """How many tensors are alive, without help of the cycle collector, that a graph made."""
    return sum(type(each) is Tensor and each.grad_fn is not None for each in gc.get_objects())


def test_parameters_are_as_before() -> None:
    loaded = zoo.build("llama", fresh=True)
    loaded.model.layers[0].requires_grad_(False)
    model, asked = jf.Model(loaded), {name: each.requires_grad for name, each in loaded.named_parameters()}
    model.run(PROMPT, lambda m, t: t.gradient(m.logits.sum(), m.logits), gradients=True)
    assert {name: each.requires_grad for name, each in loaded.named_parameters()} == asked
    assert set(asked.values()) == {True, False}
    assert all(each.grad is None for each in loaded.parameters())
    assert "forward" not in vars(loaded.model.embed_tokens)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference mode"])
def test_whatever_the_caller_has_set(model: jf.Model, mode: Callable[[], Any]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        stream = m.layers[0].layer_output
        return t.gradient(loss_of(m), stream)

    with mode():
        found = model.run(PROMPT, block, gradients=True).returned
        assert not torch.is_grad_enabled()
    assert found.equal(model.run(PROMPT, block, gradients=True).returned)


def test_a_model_without_named_embeddings_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.engines.transformers.engine.beginning", lambda anatomy: None)
    model = jf.Model(zoo.build("llama"))
    assert isinstance(model._engine, TransformersEngine)
    with pytest.raises(jf.Unavailable, match=r"gradients=True is not available: its graph begins at the token embed"):
        model.run(PROMPT, lambda m, t: None, gradients=True)
