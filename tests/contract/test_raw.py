"""Raw places: any submodule's `.input`, `.inputs`, `.output`, and the virtual child `attn` of an attention module."""

# `list().save()` is how a block makes a list to save.
# ruff: noqa: C408

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jackfield as jf


def attention_path(model: jf.Model) -> str:
    return repr(model.layers[1].attention).split()[-1].rstrip(">")


def hooked(raw: nn.Module, path: str, prompt: list[int]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """What a torch hook sees of a module's call."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    handle = raw.get_submodule(path).register_forward_hook(lambda _, a, k, o: seen.append((a, k, o)), with_kwargs=True)
    with torch.no_grad():
        raw(torch.tensor([prompt]))
    handle.remove()
    return seen[0]


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def test_input_is_the_first_argument_however_it_was_passed(model: jf.Model, raw: nn.Module, prompt: list[int]) -> None:
    """Llama calls its attention by keywords alone, gpt2 by position."""
    path = attention_path(model)
    args, kwargs, _ = hooked(raw, path, prompt)
    attention = model.layers[1].attention
    with model.trace(prompt):
        x = attention.input.save()
    torch.testing.assert_close(x, args[0] if args else kwargs["hidden_states"])


def test_inputs_are_args_and_kwargs(model: jf.Model, raw: nn.Module, prompt: list[int]) -> None:
    args, kwargs, _ = hooked(raw, attention_path(model), prompt)
    attention = model.layers[1].attention
    with model.trace(prompt):
        given, named = attention.inputs
        given, shapes = len(given), {name: getattr(x, "shape", None) for name, x in named.items()}
        given.save(), shapes.save()
    assert given == len(args)
    mask = shapes.get("attention_mask")  # where it is passed by name
    assert mask is None or mask[-2:] == (len(prompt), len(prompt))
    assert kwargs.keys() <= shapes.keys()


def test_output_is_what_the_module_returns(model: jf.Model, raw: nn.Module, prompt: list[int]) -> None:
    path = attention_path(model)
    _, _, output = hooked(raw, path, prompt)
    attention = model.layers[1].attention
    with model.trace(prompt):
        x = attention.output.save()
    assert type(x) is type(output)
    torch.testing.assert_close(first(x), first(output))


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_an_edited_input_goes_back_where_it_was_passed(
    model: jf.Model, raw: nn.Module, prompt: list[int], how: str
) -> None:
    attention = model.layers[1].attention

    def by_name(m: jf.Model, t: Any) -> Any:
        m.layers[1].attention_norm_output *= 0.5
        return m.logits

    def by_place(m: jf.Model, t: Any) -> Any:
        if how == "in place":
            attention.input.mul_(0.5)
        else:
            attention.input = attention.input * 0.5
        return m.logits

    expected = model.run(prompt, by_name).returned
    torch.testing.assert_close(model.run(prompt, by_place).returned, expected, rtol=1e-5, atol=1e-5)
    assert not expected.equal(model.run(prompt, lambda m, t: m.logits).returned)


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_an_edited_output_is_what_goes_on(model: jf.Model, raw: nn.Module, prompt: list[int], how: str) -> None:
    attention = model.layers[1].attention

    def by_place(m: jf.Model, t: Any) -> Any:
        x = attention.output
        if how == "in place":
            first(x).zero_()
        else:
            zeros = torch.zeros_like(first(x))
            attention.output = zeros if isinstance(x, Tensor) else (zeros, *x[1:])
        return m.logits

    def by_name(m: jf.Model, t: Any) -> Any:
        m.layers[1].attention_output *= 0
        return m.logits

    expected = model.run(prompt, by_name).returned
    torch.testing.assert_close(model.run(prompt, by_place).returned, expected)
    assert not expected.equal(model.run(prompt, lambda m, t: m.logits).returned)


def test_an_assignment_of_another_kind_is_refused(model: jf.Model, raw: nn.Module, prompt: list[int]) -> None:
    attention = model.layers[1].attention

    def narrower(m: jf.Model, t: Any) -> None:
        attention.input = attention.input[..., :-1]

    def first_alone(m: jf.Model, t: Any) -> None:
        attention.output = attention.output[0]

    with pytest.raises(jf.EditMismatch, match=r"\.input was edited with shape"):
        model.run(prompt, narrower)
    with pytest.raises(jf.EditMismatch, match=r"\.output (is a tuple of 2; .*Tensor|was edited with shape)"):
        model.run(prompt, first_alone)


def test_a_path_of_its_own(model: jf.Model, raw: nn.Module, prompt: list[int]) -> None:
    """By the module's own names from the root, and a typo on the way."""
    path = attention_path(model)
    names = path.split(".")

    def walk(m: Any) -> Any:
        for name in names:
            m = m[int(name)] if name.isdigit() else getattr(m, name)
        return m

    assert repr(walk(model)) == repr(model.layers[1].attention)
    with pytest.raises(jf.UnknownValue, match="no value, submodule or attribute"):
        _ = walk(model).o_porj


def test_raw_places_in_company_run_alone(model: jf.Model, raw: nn.Module, prompts: list[list[int]]) -> None:
    attention = model.layers[1].attention

    def block(m: jf.Model, t: Any) -> Any:
        return attention.input

    for prompt, result in zip(prompts, model.run(prompts, block), strict=True):
        assert result.returned.shape == (1, len(prompt), model.hidden_size)


def pattern_of(q: Tensor, k: Tensor, heads: int, scale: float) -> Tensor:
    """An ordinary helper: [t, H * d] and [keys, Hkv * d] to [H, t, keys]."""
    q = q.unflatten(-1, (heads, -1)).transpose(0, 1)
    k = k.unflatten(-1, (-1, q.shape[-1])).transpose(0, 1)
    scores = q @ k.repeat_interleave(heads // k.shape[0], 0).transpose(-1, -2) * scale
    mask = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
    return scores.masked_fill(mask, -math.inf).softmax(-1)


def test_the_pattern_from_what_the_kernel_is_given(model: jf.Model, raw: nn.Module, prompt: list[int]) -> None:
    """The module bound outside, a helper, keys kept over generation steps; checked against the output projection."""
    attention = model.layers[1].attention
    projection = next(getattr(attention, name) for name in ("o_proj", "c_proj", "wo") if hasattr(attention, name))
    heads, scale = model.num_heads, attention.scale

    with model.trace(prompt, max_tokens=3, ignore_eos=True) as t:
        rows, kept_keys, kept_values = list().save(), [], []
        for _ in t.iter[:]:
            (q, k, v), _ = attention.attn.inputs
            kept_keys.append(k)
            kept_values.append(v)
            pattern = pattern_of(q, torch.cat(kept_keys), heads, scale)
            values = torch.cat(kept_values).unflatten(-1, (-1, q.shape[-1] // heads)).transpose(0, 1)
            mixed = pattern @ values.repeat_interleave(heads // values.shape[0], 0)
            heads_out = attention.attn.output
            rows.append((mixed.transpose(0, 1).flatten(1), heads_out, projection.input[0], pattern.shape[-1]))
    assert [row[3] for row in rows] == [len(prompt), len(prompt) + 1, len(prompt) + 2]
    for mixed, heads_out, projected, _ in rows:
        torch.testing.assert_close(mixed, projected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(heads_out, projected, rtol=1e-5, atol=1e-6)


def test_what_the_kernel_is_given_can_be_edited(model: jf.Model, raw: nn.Module, prompt: list[int]) -> None:
    attention = model.layers[1].attention

    def by_place(m: jf.Model, t: Any) -> Any:
        (q, k, v), named = attention.attn.inputs
        attention.attn.inputs = ((q, k, v * 2), named)
        attention.attn.output[-1] *= 0.5
        return m.logits

    def by_name(m: jf.Model, t: Any) -> Any:
        m.layers[1].attention_values *= 2
        m.layers[1].attention_head_outputs[:, -1] *= 0.5
        return m.logits

    torch.testing.assert_close(model.run(prompt, by_place).returned, model.run(prompt, by_name).returned)
