"""What each name is: its axes, its meaning, rows and heads of it, and a layer that is skipped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import jackfield as jf
from tests.contract.conftest import Subject

ROOT = tuple(value.name for value in jf.values() if value.on == "model")
OF_LAYERS = tuple(value.name for value in jf.values() if value.on != "model")
NAMES = (*ROOT, *OF_LAYERS)


def sizes(model: jf.Model, tokens: int, keys: int) -> dict[str, int]:
    """The length of each axis, by the contract's letters."""
    return {
        **{"1": 1, "t": tokens, "k": keys, "h": model.hidden_size, "vocab": model.vocab_size},
        **{"H": model.num_heads, "Hkv": model.num_kv_heads, "d": model.head_dim, "dv": model.head_dim},
    }


def part(m: jf.Model, name: str, layer: int = 0) -> Any:
    return m if name in ROOT else m.layers[layer]


def available(model: jf.Model, name: str) -> None:
    reason = model.support(None if name in ROOT else 0)[name]
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


@pytest.mark.parametrize("name", NAMES)
def test_axes_and_dtypes(model: jf.Model, prompts: list[list[int]], name: str) -> None:
    """The same on every engine, in a batch of different lengths, on prefill and decode."""
    available(model, name)
    value = next(value for value in jf.values() if value.name == name)

    def block(m: jf.Model, t: Any) -> Any:
        return [getattr(part(m, name), name) for _ in t.iter[:]]

    for prompt, result in zip(prompts, model.run(prompts, block, max_tokens=2, ignore_eos=True), strict=True):
        for step, x in enumerate(result.returned):
            lengths = sizes(model, len(prompt) if step == 0 else 1, len(prompt) + step)
            letters = value.axes.split()
            if "intermediate" not in letters:
                assert list(x.shape) == [lengths[letter] for letter in letters]
            assert x.dtype == {"model": model.dtype, "float32": torch.float32, "int64": torch.int64}[value.dtype]
            assert x.device.type == model.device.type


def test_every_name_is_listed(model: jf.Model) -> None:
    support = model.support()
    assert set(NAMES) <= set(support)
    assert set(model.layers[0].support()) == set(OF_LAYERS)
    assert all(reason is None or isinstance(reason, str) for reason in support.values())
    for value in jf.values():
        assert value.access in ("r", "rw")
        assert value.meaning


def test_facts(model: jf.Model) -> None:
    assert len(model.layers) == model.num_layers == len(list(model.layers))
    assert [layer.attention.num_heads for layer in model.layers[:1]] == [model.num_heads]
    assert model.layers[-1].attention.head_dim == model.head_dim
    assert model.layers[0].attention.scale == pytest.approx(model.head_dim**-0.5)
    with pytest.raises(jf.UnknownValue, match="There is no layer 99"):
        _ = model.layers[99]


def test_the_identities(model: jf.Model, prompts: list[list[int]]) -> None:
    """The stream adds up; the pattern mixes the values; probabilities are the softmax of scores; heads add up."""

    def block(m: jf.Model, t: Any) -> Any:
        rows = []
        for _ in t.iter[:]:
            for layer in m.layers:
                enters = layer.layer_input
                values = layer.attention_cached_values.repeat_interleave(m.num_heads // m.num_kv_heads, 1)
                scores = layer.attention_scores
                pattern = layer.attention_probabilities
                heads = layer.attention_head_outputs
                attention, mid = layer.attention_output, layer.layer_mid
                mlp, leaves = layer.mlp_output, layer.layer_output
                rows += [
                    (enters + attention, mid),
                    (mid + mlp, leaves),
                    (scores.softmax(-1), pattern),
                    ((pattern @ values).transpose(1, 2), heads),
                ]
        return rows

    for result in model.run(prompts, block, max_tokens=2, ignore_eos=True):
        for one, other in result.returned:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_key_axis_is_absolute_and_causal(model: jf.Model, prompts: list[list[int]]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        return [(m.layers[0].attention_scores, m.layers[0].attention_probabilities) for _ in t.iter[:]]

    for prompt, result in zip(prompts, model.run(prompts, block, max_tokens=3, ignore_eos=True), strict=True):
        for step, (scores, pattern) in enumerate(result.returned):
            rows = range(len(prompt)) if step == 0 else [len(prompt) + step - 1]
            unseen = torch.tensor([[key > row for key in range(len(prompt) + step)] for row in rows])
            assert torch.isneginf(scores).equal(unseen.expand_as(scores))
            assert (pattern[unseen.expand_as(pattern)] == 0).all()


def test_edited_scores_stay_masked_and_a_row_with_nothing_writes_zeros(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[0]
        scores = layer.attention_scores
        scores[:] = 5.0
        scores[:, 0, -1] = -torch.inf
        return layer.attention_probabilities, layer.attention_head_outputs

    pattern, heads = model.run(prompt, block).returned
    length = len(prompt)
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    assert (pattern[:, :, unseen] == 0).all()
    torch.testing.assert_close(pattern[0, 1, -1], torch.full((length,), 1 / length))
    assert (pattern[0, 0, -1] == 0).all()
    assert (heads[0, -1, 0] == 0).all()
    assert (heads[0, -1, 1] != 0).any()


def test_a_row_put_back_is_as_it_was(model: jf.Model, prompt: list[int]) -> None:
    """Edited by one write, and put back by another: the head outputs are those of the row that stands."""

    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[0]
        before = layer.attention_probabilities.clone()
        layer.attention_probabilities[:, :, 2:] = 0
        layer.write("attention_probabilities", before[:, :, 2:3], queries=[2])
        return layer.attention_head_outputs

    heads = model.run(prompt, block).returned
    plain = model.run(prompt, lambda m, t: m.layers[0].attention_head_outputs).returned
    torch.testing.assert_close(heads[:, :3], plain[:, :3], rtol=1e-5, atol=1e-6)
    assert (heads[:, 3:] == 0).all()


def test_an_edited_pattern_stays_masked(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[0]
        values = layer.attention_cached_values.repeat_interleave(m.num_heads // m.num_kv_heads, 1)
        layer.attention_probabilities = torch.ones_like(layer.attention_probabilities)
        return values, layer.attention_head_outputs

    values, heads = model.run(prompt, block).returned
    torch.testing.assert_close(heads, values.cumsum(2).transpose(1, 2), rtol=1e-5, atol=1e-5)


# -- rows and heads


@pytest.mark.parametrize("name", [name for name in OF_LAYERS if "cached" not in name])
def test_rows_and_heads_are_parts_of_the_whole(model: jf.Model, prompt: list[int], name: str) -> None:
    available(model, name)
    value = next(value for value in jf.values() if value.name == name)
    heads = {} if value.head_axis is None else {"heads": [0]}

    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[0]
        return getattr(layer, name), layer.read(name, queries=[-1, 2], **heads), layer.read(name, queries=slice(1, 3))

    whole, picked, sliced = model.run(prompt, block).returned
    axis = value.token_axis
    assert axis is not None
    expected = whole.index_select(axis, torch.tensor([len(prompt) - 1, 2]))
    expected = expected.narrow(value.head_axis, 0, 1) if value.head_axis is not None else expected
    torch.testing.assert_close(picked, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sliced, whole.narrow(axis, 1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [value.name for value in jf.values() if value.on != "model" and value.access == "rw"])
def test_a_write_mirrors_the_read(
    model: jf.Model, prompt: list[int], name: str, editable: Callable[[str], None]
) -> None:
    available(model, name)
    editable(name)
    value = next(value for value in jf.values() if value.name == name)
    picks: dict[str, Any] = {} if value.head_axis is None else {"heads": 0}
    if value.token_axis is not None:
        picks["queries"] = -1

    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[0]
        before = getattr(layer, name).clone()
        layer.write(name, layer.read(name, **picks) * 0.5, **picks)
        return before, getattr(layer, name)

    before, after = model.run(prompt, block).returned
    expected = before.clone()
    at: list[Any] = [slice(None)] * expected.ndim
    if value.head_axis is not None:
        at[value.head_axis] = 0
    if value.token_axis is not None:
        at[value.token_axis] = -1
    expected[tuple(at)] *= 0.5
    torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-6)
    assert not after.equal(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "layer_outptu"}, "no value 'layer_outptu'.* Did you mean 'layer_output'"),
        ({"name": "layer_output", "heads": [0]}, "layer_output has no head axis"),
        ({"name": "attention_scores", "heads": [99]}, "no head 99"),
        ({"name": "attention_scores", "queries": [7]}, "no token 7 here: tokens are 0 to 6"),
        ({"name": "attention_scores", "queries": []}, "name at least one"),
        ({"name": "attention_cached_keys", "queries": [0]}, "attention_cached_keys has no token axis"),
    ],
)
def test_rows_and_heads_that_are_not_there(
    model: jf.Model, prompt: list[int], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(jf.UnknownValue, match=message):
        model.run(prompt, lambda m, t: m.layers[0].read(**arguments))


# -- skip


def test_a_skipped_layer_hands_its_input_on(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        rows = []
        for _ in t.iter[:]:
            enters = m.layers[0].layer_input
            m.layers[0].skip()
            rows.append((enters, m.layers[1].layer_input))
        return rows

    for enters, leaves in model.run(prompt, block, max_tokens=3, ignore_eos=True).returned:
        assert leaves.equal(enters)


def test_a_skip_hands_on_what_it_is_given(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        hidden = torch.ones(1, len(m.input_ids[0]), m.hidden_size)
        m.layers[0].skip(hidden)
        return m.layers[1].layer_input

    assert (model.run(prompt, block).returned == 1).all()


def test_skipping_on_the_prefill_alone_decodes_on(engine: Subject) -> None:
    """In company: who does not skip is as alone."""
    model, prompts = engine.model, engine.prompts

    def streams(m: jf.Model, t: Any, *, skips: bool) -> Any:
        rows = []
        for step in t.iter[:]:
            if skips and step == 0:
                m.layers[0].skip()
            rows.append(m.layers[1].layer_output)
        return rows

    alone = model.run(prompts[0], lambda m, t: streams(m, t, skips=False), max_tokens=3, ignore_eos=True).returned
    with model.trace(max_tokens=3, ignore_eos=True) as t:
        with t.invoke(prompts[0]):
            plain = streams(model, t, skips=False).save()
        with t.invoke(prompts[0]):
            skipped = streams(model, t, skips=True).save()
        with t.invoke(prompts[1]):
            streams(model, t, skips=True)
    assert [len(result.token_ids) for result in t.results] == [3, 3, 3]
    for one, other, third in zip(alone, plain, skipped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert third.shape == one.shape
    assert not skipped[0].allclose(plain[0])


def test_skipping_always_is_the_model_without_the_layer_when_computed_whole(model: jf.Model, prompt: list[int]) -> None:
    """From the cache, and in one pass over the longer prompt: the same last row."""

    def skipping(m: jf.Model, t: Any) -> Any:
        rows = []
        for _ in t.iter[:]:
            m.layers[0].skip()
            rows.append(m.layers[1].layer_output[:, -1])
        return rows

    result = model.run(prompt, skipping, max_tokens=3, ignore_eos=True)
    whole = model.run([*prompt, *result.token_ids[:2]], skipping)
    torch.testing.assert_close(result.returned[-1], whole.returned[0], rtol=1e-4, atol=1e-5)


# -- the model's own functions


def test_the_last_stream_on_the_vocabulary_is_the_logits(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        stream = m.layers[-1].layer_output
        inside = m.project_on_vocab(stream)
        normed = m.final_norm_output
        return stream, inside, m.project_on_vocab(normed, norm=False), m.logits, m.next_token_probabilities

    stream, inside, normed, logits, probabilities = model.run(prompt, block).returned
    torch.testing.assert_close(inside[:, -1:], logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normed, inside, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.project_on_vocab(stream), inside)
    torch.testing.assert_close(model.project_on_vocab(stream[0, 2]), inside[0, 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(probabilities, logits[:, 0].float().softmax(-1))


def test_edited_logits_choose_the_token(model: jf.Model, prompt: list[int]) -> None:
    with model.trace(prompt, max_tokens=3, ignore_eos=True) as t:
        for step in t.iter[:]:
            model.logits[..., 10 + step] = 1e4
    assert t.result.token_ids == [10, 11, 12]


def test_a_shared_object_is_no_copy(model: jf.Model, prompt: list[int]) -> None:
    """Two blocks beside each other have the same one."""
    bank = torch.zeros(2, model.hidden_size)
    shared = model.share(bank)
    with model.trace([prompt, prompt]):
        stream = model.layers[0].layer_output
        address = shared.value.data_ptr()
        shapes = ((stream + shared[0]).shape, torch.matmul(stream, shared.T).shape)
        kept = (address, shapes).save()
    assert kept[0] == kept[1]
    assert kept[0][1] == ((1, len(prompt), model.hidden_size), (1, len(prompt), 2))


@pytest.mark.parametrize("inside", [True, False], ids=["inside a block", "outside"])
@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda x: x.tolist(), "a list"),
        (lambda x: x[..., 1:], r"torch\.float32 \(1, 7, \d+\)"),
        (lambda x: x.double(), r"torch\.float64"),
        (lambda x: x.long(), r"torch\.int64"),
        (lambda x: x[0, 0, 0], r"torch\.float32 \(\)"),
    ],
    ids=["list", "width", "float64", "int64", "scalar"],
)
def test_what_is_no_stream_is_not_projected(
    model: jf.Model, prompt: list[int], change: Callable[[Any], Any], given: str, inside: bool
) -> None:
    x = torch.ones(1, len(prompt), model.hidden_size, device=model.device)
    takes = r"project_on_vocab takes (a tensor )?\[\.\.\., .*; it was given"

    def project(m: jf.Model, t: Any) -> None:
        m.project_on_vocab(change(x))

    with pytest.raises(jf.EditMismatch, match=f"{takes} {given}"):
        model.run(prompt, project) if inside else project(model, None)


def test_no_row_is_projected_to_no_row(model: jf.Model) -> None:
    empty = torch.ones(2, 0, model.hidden_size, device=model.device)
    assert model.project_on_vocab(empty).shape == (2, 0, model.vocab_size)


SURROUNDINGS = {
    "default dtype": lambda: _default_dtype(torch.float64),
    "another device": lambda: torch.device("meta"),
}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("name", ["attention_scores", "attention_probabilities", "attention_head_outputs"])
def test_what_torch_makes_by_default_in_a_block_is_not_what_is_read(
    model: jf.Model, prompt: list[int], name: str, surroundings: str
) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        part, found = m.layers[1], []
        with SURROUNDINGS[surroundings]():
            found.append(getattr(m.layers[0], name))
            found.append(part.read(name, heads=[0], queries=[-1]))
            part.write(name, found[-1] * 1, heads=[0], queries=[-1])
            found.append(getattr(part, name))
        return found

    def plain(m: jf.Model, t: Any) -> Any:
        part, found = m.layers[1], [getattr(m.layers[0], name)]
        return [*found, part.read(name, heads=[0], queries=[-1]), getattr(part, name)]

    for got, want in zip(model.run(prompt, block).returned, model.run(prompt, plain).returned, strict=True):
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
