"""A model that its owner changes, before or after it is loaded: hooks, adapters, patches, other modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jackfield as jf
from tests import zoo

IDS = zoo.prompt("llama", 9)[0].tolist()
Change = Callable[[Any], object]


def changed(change: Change, *, before: bool) -> tuple[Any, jf.Model]:
    """A llama that is changed before it is loaded, or after, when every value has been read once."""
    theirs = zoo.build("llama", fresh=True)
    if before:
        change(theirs)
    model = jf.Model(theirs)
    if not before:
        model.run(IDS, sums)
        change(theirs)
    return theirs, model


def sums(m: jf.Model, t: Any) -> Any:
    """What has to agree around layer 1: heads and attention, the stream and its two summands, output and next input."""
    layer, after = m.layers[1], m.layers[2]
    entering, heads, attention = layer.layer_input, layer.attention_head_results, layer.attention_output
    middle, mlp, leaving = layer.layer_mid, layer.mlp_output, layer.layer_output
    return (
        (heads.sum(2), attention),
        (entering + attention, middle),
        (middle + mlp, leaving),
        (leaving, after.layer_input),
    )


def alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


class Adapter(nn.Module):
    """A projection and what was learned beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 3 * self.up(self.down(x))


def adapt(theirs: Any) -> None:
    attention = theirs.model.layers[1].self_attn
    attention.o_proj = Adapter(attention.o_proj)


def patch(theirs: Any) -> None:
    projection = theirs.model.layers[1].self_attn.o_proj
    forward = projection.forward
    projection.forward = lambda x: 2 * forward(x)


def hook_projection(theirs: Any) -> None:
    theirs.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, output: 2 * output)


def hook_mlp(theirs: Any) -> None:
    theirs.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)


def hook_block(theirs: Any) -> None:
    theirs.model.layers[1].register_forward_hook(lambda module, args, output: output + 1)


CHANGES = [adapt, patch, hook_projection, hook_mlp]


@pytest.mark.parametrize("before", [True, False], ids=["before loading", "after loading"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_read_is_what_leaves_the_module(change: Change, before: bool) -> None:
    theirs, model = changed(change, before=before)
    hooks = [list(module._forward_hooks) for module in theirs.modules()]
    heads, middle, leaving, after = model.run(IDS, sums).returned
    assert alike(*heads)
    assert alike(*middle)
    assert alike(*leaving)
    assert torch.equal(*after)
    assert [list(module._forward_hooks) for module in theirs.modules()] == hooks


@pytest.mark.parametrize("before", [True, False], ids=["before loading", "after loading"])
def test_a_block_that_a_hook_adds_to(before: bool) -> None:
    """What the hook adds is no sublayer's: where it was there at load, the sublayers say so."""
    _, model = changed(hook_block, before=before)

    def block(m: jf.Model, t: Any) -> Any:
        return m.layers[1].layer_output, m.layers[2].layer_input

    assert torch.equal(*model.run(IDS, block).returned)
    assert ("residual_stream" in model.support()) is before
    assert (model.support(1)["mlp_output"] is not None) is before


@pytest.mark.parametrize("change", [hook_mlp, hook_block])
def test_what_is_written_is_what_the_next_reader_sees(change: Change) -> None:
    _, model = changed(change, before=False)

    def block(m: jf.Model, t: Any) -> Any:
        entering = m.layers[1].layer_mid
        m.layers[1].mlp_output.zero_()
        added = m.layers[1].layer_output - entering
        m.layers[1].layer_output.zero_()
        return added, m.layers[2].layer_input

    added, entering = model.run(IDS, block).returned
    assert alike(added, torch.full_like(added, 1.0 if change is hook_block else 0.0))
    assert not entering.any()


def test_a_hook_on_every_module_is_one_too() -> None:
    _, model = changed(lambda theirs: None, before=False)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 2 * output if type(module).__name__ == "LlamaMLP" else None
    )
    try:
        _, _, leaving, _ = model.run(IDS, sums).returned
    finally:
        handle.remove()
    assert alike(*leaving)


def test_prerotary_heads_behind_a_hook() -> None:
    """At position 0 the rotary embedding turns nothing; also with gradients, where the node itself is handed out."""
    _, model = changed(
        lambda theirs: theirs.model.layers[1].self_attn.q_proj.register_forward_hook(
            lambda m, args, output: 2 * output
        ),
        before=False,
    )

    def block(m: jf.Model, t: Any) -> Any:
        before, after = m.layers[1].attention_queries_prerotary, m.layers[1].attention_queries
        slope = t.gradient(m.logits[0, 0, 5], before) if t.step == 0 and torch.is_grad_enabled() else None
        return before[:, :, 0].detach(), after[:, :, 0].detach(), slope

    for gradients in (False, True):
        before, after, slope = model.run(IDS, block, gradients=gradients).returned
        assert alike(before, after)
        assert gradients is (slope is not None)


def test_a_projection_that_is_no_sum_over_heads_is_refused() -> None:
    _, model = changed(
        lambda theirs: theirs.model.layers[1].self_attn.o_proj.register_forward_hook(lambda m, args, output: output**2),
        before=True,
    )
    with pytest.raises(jf.Unavailable, match="what Linear gives is not a sum over heads"):
        model.run(IDS, lambda m, t: m.layers[1].attention_head_results)


def test_one_head_of_an_adapted_projection() -> None:
    _, model = changed(adapt, before=True)

    def block(m: jf.Model, t: Any) -> Any:
        picked = m.layers[1].read("attention_head_results", heads=[2, 0], queries=[-1])
        return picked, m.layers[1].attention_head_results[:, -1:, [2, 0]]

    picked, whole = model.run(IDS, block).returned
    assert alike(picked, whole)


def projected(m: jf.Model, t: Any) -> Any:
    return m.project_on_vocab(m.layers[-1].layer_output)[:, -1:], m.logits


def resize(theirs: Any) -> None:
    theirs.resize_token_embeddings(zoo.VOCAB + 8, mean_resizing=False)


def other_ends(theirs: Any) -> None:
    theirs.lm_head, theirs.model.norm = nn.Linear(64, zoo.VOCAB, bias=False), nn.Identity()


@pytest.mark.parametrize("change", [resize, other_ends])
def test_the_projection_on_the_vocabulary_is_the_one_that_makes_the_logits_now(change: Change) -> None:
    theirs = zoo.build("llama", fresh=True)
    model = jf.Model(theirs)
    model.run(IDS, projected)
    change(theirs)
    assert alike(*model.run(IDS, projected).returned)
    assert model.vocab_size == theirs.lm_head.out_features


def test_the_dtype_is_the_one_it_has_now() -> None:
    theirs = zoo.build("llama", fresh=True)
    model = jf.Model(theirs)
    theirs.double()
    assert model.dtype is torch.float64
    assert model.run(IDS, lambda m, t: m.layers[1].layer_output).returned.dtype is torch.float64


def cut_layers(theirs: Any) -> None:
    theirs.model.layers = theirs.model.layers[:2]


def other_mlp(theirs: Any) -> None:
    theirs.model.layers[1].mlp = nn.Sequential(nn.Linear(64, 64))


def other_attention(theirs: Any) -> None:
    kept = theirs.model.layers[1].self_attn
    kept.back = kept.o_proj
    del kept.o_proj


@pytest.mark.parametrize(
    ("change", "name", "gone"),
    [
        (cut_layers, "layer_output", r"layers\.2"),
        (other_mlp, "mlp_activations", r"layers\.1\.mlp\.down_proj"),
        (other_attention, "attention_head_results", r"layers\.1\.self_attn\.o_proj"),
    ],
)
def test_a_model_of_another_structure_is_to_be_loaded_again(change: Change, name: str, gone: str) -> None:
    _, model = changed(change, before=False)
    with pytest.raises(jf.UnsupportedModel, match=rf"had a module model\.{gone} when it was loaded.*Load it again"):
        model.run(IDS, lambda m, t: getattr(m.layers[0], name))


def test_a_closed_model_projects_nothing() -> None:
    model = jf.Model(zoo.build("llama", fresh=True))
    model.close()
    with pytest.raises(jf.EngineDied, match="was closed"):
        model.project_on_vocab(torch.ones(1, 64))
