"""Reading and editing: private copies, write-back, order, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jackfield as jf
from tests.contract.conftest import Subject

WRITABLE = (
    "layer_input",
    "attention_norm_output",
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_cached_keys",
    "attention_cached_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
    "attention_premix",
    "attention_output",
    "layer_mid",
    "mlp_norm_output",
    "mlp_activations",
    "mlp_output",
    "layer_output",
)
READ_ONLY = ("attention_queries_prerotary", "attention_keys_prerotary", "attention_head_results")
RECOMPUTED = ("attention_scores", "attention_probabilities")

Block = Callable[[jf.Model, Any], Any]


def available(model: jf.Model, name: str) -> str:
    reason = model.support(0)[name]
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.mark.parametrize("name", [*WRITABLE, *READ_ONLY])
def test_reading_again_gives_the_same_tensor(model: jf.Model, prompt: list[int], name: str) -> None:
    def block(m: jf.Model, t: Any) -> bool:
        return getattr(m.layers[0], name) is getattr(m.layers[0], name)

    available(model, name)
    assert model.run(prompt, block).returned is True


@pytest.mark.parametrize("name", [*WRITABLE, *READ_ONLY])
def test_a_read_is_a_private_copy(model: jf.Model, prompt: list[int], name: str) -> None:
    """It shares no memory with what the model goes on with, nor with a copy that another read hands out."""

    def block(m: jf.Model, t: Any) -> list[int]:
        layer = m.layers[0]
        return [x.untyped_storage().data_ptr() for x in (getattr(layer, name), layer.read(name, queries=[0]))]

    available(model, name)
    if "cached" in name:
        pytest.skip("it has no token axis")
    one, other = model.run(prompt, block).returned
    assert one != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("layer_output", 0), ("layer_input", 1)),
        (("attention_keys", 0), ("attention_cached_keys", 0)),
        (("attention_head_outputs", 0), ("attention_premix", 0)),
    ],
    ids=lambda place: place[0],
)
def test_what_is_one_tensor_in_the_model_is_two_copies(
    model: jf.Model, prompt: list[int], one: tuple[str, int], other: tuple[str, int]
) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        copies = [getattr(m.layers[layer], name) for name, layer in (one, other)]
        return [copy.untyped_storage().data_ptr() for copy in copies]

    first, second = model.run(prompt, block).returned
    assert first != second


@pytest.mark.parametrize("name", WRITABLE)
def test_an_edit_is_what_the_next_read_sees(
    model: jf.Model, prompt: list[int], name: str, editable: Callable[[str], None]
) -> None:
    """To one rounding of its dtype: halved, and halved by assignment, then read anew."""
    editable(name)

    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[0]
        x = getattr(layer, name)
        x *= 0.5
        half = x.clone()
        setattr(layer, name, half * 0.5)
        return half, getattr(layer, name)

    half, again = model.run(prompt, block).returned if available(model, name) else (None, None)
    finite = torch.isfinite(half)
    torch.testing.assert_close(again[finite], half[finite] * 0.5, rtol=1e-6, atol=1e-6)
    assert again.shape == half.shape


@pytest.mark.parametrize("name", WRITABLE)
def test_the_model_goes_on_with_the_edit(
    model: jf.Model, prompt: list[int], name: str, editable: Callable[[str], None]
) -> None:
    """In place, and assigned: the same logits, and others than without."""
    editable(name)

    def in_place(m: jf.Model, t: Any) -> Any:
        x = getattr(m.layers[0], name)
        x[:, -1] *= 0.5
        return m.logits

    def assigned(m: jf.Model, t: Any) -> Any:
        x = getattr(m.layers[0], name).clone()
        x[:, -1] *= 0.5
        setattr(m.layers[0], name, x)
        return m.logits

    available(model, name)
    plain = model.run(prompt, lambda m, t: m.logits).returned
    one, other = (model.run(prompt, block).returned for block in (in_place, assigned))
    assert not one.equal(plain)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", WRITABLE)
def test_reading_and_identity_edits_change_no_bit(engine: Subject, prompt: list[int], name: str) -> None:
    model = engine.model

    def read(m: jf.Model, t: Any) -> Any:
        getattr(m.layers[0], name)
        return m.logits

    def rewrite(m: jf.Model, t: Any) -> Any:
        x = getattr(m.layers[0], name)
        x.copy_(x.clone())
        return m.logits

    available(model, name)
    plain = model.run(prompt, lambda m, t: m.logits).returned
    assert model.run(prompt, read).returned.equal(plain)
    if name not in (*RECOMPUTED, *engine.read_only):
        assert model.run(prompt, rewrite).returned.equal(plain)


def test_an_edited_key_is_what_the_cache_holds(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        layer, seen = m.layers[0], []
        for step in t.iter[:3]:
            if step == 1:
                layer.attention_keys[:] = 7.0
                layer.attention_values[:] = -7.0
            seen.append((layer.attention_cached_keys, layer.attention_cached_values))
        return seen

    seen = model.run(prompt, block, max_tokens=3, ignore_eos=True).returned
    at = len(prompt)
    for keys, values in seen[1:]:
        assert (keys[:, :, at] == 7.0).all()
        assert (values[:, :, at] == -7.0).all()
        assert keys[:, :, :at].equal(seen[0][0])
        assert values[:, :, :at].equal(seen[0][1])


def test_queries_keys_and_values_come_in_any_order(model: jf.Model, prompt: list[int]) -> None:
    names = [
        *("attention_cached_values", "attention_values", "attention_keys_prerotary", "attention_queries"),
        *("attention_cached_keys", "attention_queries_prerotary", "attention_keys"),
    ]

    def reading(order: list[str]) -> Block:
        def block(m: jf.Model, t: Any) -> Any:
            return {name: getattr(m.layers[1], name) for name in order if m.support(1)[name] is None}

        return block

    one, other = (model.run(prompt, reading(order)).returned for order in (names, names[::-1]))
    for name, value in one.items():
        assert value.equal(other[name]), name


def test_an_edit_of_an_operand_does_not_outdate_the_others(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[0]
        queries = layer.attention_queries
        layer.attention_values *= 2
        queries *= 0
        return layer.attention_probabilities, layer.attention_head_outputs

    pattern, heads = model.run(prompt, block).returned
    row = pattern[0, 0, -1]
    torch.testing.assert_close(row, torch.full_like(row, 1 / len(prompt)))
    assert heads.abs().sum() > 0


# -- what is no edit


def test_a_rebind_is_not_an_edit_and_a_change_is(model: jf.Model, prompt: list[int]) -> None:
    def rebind(m: jf.Model, t: Any) -> Any:
        h = m.layers[0].layer_output
        h = h * 0
        return m.logits

    def sliced(m: jf.Model, t: Any) -> Any:
        m.layers[0].layer_output[:] = 0
        return m.logits

    def augmented(m: jf.Model, t: Any) -> Any:
        m.layers[0].layer_output *= 0
        return m.logits

    def named(m: jf.Model, t: Any) -> Any:
        h = m.layers[0].layer_output
        h *= 0
        return m.logits

    def assigned(m: jf.Model, t: Any) -> Any:
        m.layers[0].layer_output = m.layers[0].layer_output * 0
        return m.logits

    plain = model.run(prompt, lambda m, t: m.logits).returned
    assert model.run(prompt, rebind).returned.equal(plain)
    zeroed = [model.run(prompt, block).returned for block in (sliced, augmented, named, assigned)]
    assert not zeroed[0].equal(plain)
    assert all(other.equal(zeroed[0]) for other in zeroed[1:])


@pytest.mark.parametrize("grad", [True, False], ids=["with grad", "without grad"])
def test_views_are_edited_in_place(model: jf.Model, prompt: list[int], grad: bool) -> None:
    """Queries are parts of one product in some families, which torch does not let be changed in place."""

    def block(m: jf.Model, t: Any) -> Any:
        m.layers[0].attention_queries[:, 0] = 0
        return m.layers[0].attention_scores[0, 0]

    with torch.set_grad_enabled(grad):
        scores = model.run(prompt, block).returned
    assert (scores[torch.isfinite(scores)] == 0).all()


# -- refusals


def too_short(x: torch.Tensor) -> torch.Tensor:
    return x[:, :-1]


def too_wide(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def broadcast(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1, :1]


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (too_short, r"edited with shape \(1, 6, \d+\); it has shape \(1, 7, \d+\)"),
        (broadcast, r"edited with shape \(1, 1, 1\)"),
        (too_wide, r"edited with dtype torch\.float64; it has dtype torch\.float32"),
        (elsewhere, r"edited with device meta; it has device cpu"),
        (lambda x: x.to_sparse(), r"edited with layout torch\.sparse_coo; it has layout torch\.strided"),
        (lambda x: 3.0, r"was assigned a float"),
    ],
    ids=["shape", "broadcast", "dtype", "device", "layout", "no tensor"],
)
def test_an_edit_of_another_kind_is_refused(
    model: jf.Model, prompt: list[int], change: Callable[[Any], Any], message: str
) -> None:
    def block(m: jf.Model, t: Any) -> None:
        m.layers[0].layer_output = change(m.layers[0].layer_output)

    with pytest.raises(jf.EditMismatch, match=rf"layers\.0\.layer_output .*{message}"):
        model.run(prompt, block)


def test_a_resize_in_place_is_refused(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        m.layers[0].layer_output.unsqueeze_(0)

    with pytest.raises(jf.EditMismatch, match=r"has shape \(1, 7, \d+\), and was changed in place to \(1, 1, 7"):
        model.run(prompt, block)


def test_the_ids_of_a_step_are_one_tensor_however_often_they_are_read(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> list[list[int]]:
        found = []
        for _ in t.iter[:]:
            first = m.input_ids
            m.layers[1].layer_output  # noqa: B018
            assert m.input_ids is first
            found.append(first[0].tolist())
        return found

    result = model.run(prompt, block, max_tokens=3, ignore_eos=True)
    assert result.returned == [prompt, *([token] for token in result.token_ids[:2])]


@pytest.mark.parametrize("name", ["attention_head_results", "next_token_probabilities", "input_ids"])
def test_what_can_be_read_only_is_not_changed(model: jf.Model, prompt: list[int], name: str) -> None:
    def part(m: jf.Model) -> Any:
        return m.layers[0] if name == "attention_head_results" else m

    def in_place(m: jf.Model, t: Any) -> None:
        getattr(part(m), name).zero_()

    def assigned(m: jf.Model, t: Any) -> None:
        setattr(part(m), name, torch.zeros(1))

    for block in (in_place, assigned):
        with pytest.raises(jf.EditMismatch, match=f"{name} can be read only"):
            model.run(prompt, block)


def test_a_change_that_comes_too_late_is_found(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        h = m.layers[0].layer_output
        m.layers[1].layer_output.sum()
        h += 1

    with pytest.raises(jf.OutOfOrder, match=r"layers\.0\.layer_output of step 0 was changed in place after"):
        model.run(prompt, block)


def test_a_clone_is_scratch(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        h = m.layers[0].layer_output.clone()
        m.layers[1].layer_output.sum()
        h += 1
        return m.logits

    assert model.run(prompt, block).returned.equal(model.run(prompt, lambda m, t: m.logits).returned)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layer_output", "attention_probabilities"),
        ("attention_probabilities", "attention_scores"),
        ("attention_scores", "attention_queries"),
        ("attention_output", "attention_head_outputs"),
        ("mlp_output", "layer_input"),
        ("mlp_output", "mlp_activations"),
        ("layer_mid", "attention_output"),
    ],
)
def test_a_read_that_comes_too_late_is_out_of_order(
    model: jf.Model, prompt: list[int], first: str, second: str
) -> None:
    """Also inside a step loop: it never waits for the next step."""

    def block(m: jf.Model, t: Any) -> None:
        for step in t.iter[:]:
            getattr(m.layers[0], first)
            if step == 1:
                getattr(m.layers[0], second)

    message = rf"layers\.0\.{second} of step 1 has gone by, and the block has moved on to layers\.0\.{first} of step 1"
    with pytest.raises(jf.OutOfOrder, match=message):
        model.run(prompt, block, max_tokens=4, ignore_eos=True)


def test_a_value_has_nothing_outside_a_block(model: jf.Model) -> None:
    with pytest.raises(jf.TracingError, match="layer_output has a value only while the model runs"):
        _ = model.layers[0].layer_output


def test_a_typo_names_what_is_near(model: jf.Model, prompt: list[int]) -> None:
    def read(m: jf.Model, t: Any) -> None:
        m.layers[0].layer_outptu  # noqa: B018

    def write(m: jf.Model, t: Any) -> None:
        m.layers[0].layer_outptu = 1

    for block in (read, write):
        with pytest.raises(jf.UnknownValue, match=r"no value.* 'layer_outptu'.* Did you mean .*'layer_output'"):
            model.run(prompt, block)
