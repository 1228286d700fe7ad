"""Faults that people met in systems of this kind: each test is one, named after it, and shows that it can fail.

Those that parity already kills (tests/reference/mutants.py) are not here again. The oracle is raw transformers.
"""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

import jackfield as jf
from tests import zoo
from tests.reference.compare import assert_close

PROMPT_TOKENS = 12
"""Past the zoo's windows of 8."""


def ids_of(name: str, length: int = PROMPT_TOKENS, seed: int = 0) -> list[int]:
    return zoo.prompt(name, length, seed=seed)[0].tolist()


@torch.no_grad()
def attentions(model: PreTrainedModel, ids: list[int]) -> tuple[Tensor, ...]:
    """What transformers itself gives."""
    return model(torch.tensor([ids]), output_attentions=True).attentions


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits


# -- attention functions and masks


def patterns(m: jf.Model, t: Any) -> Any:
    return [[layer.attention_probabilities for layer in m.layers] for _ in t.iter[:]]


@pytest.mark.parametrize("name", ["llama", "llama/8h", "llama/mqa", "mistral", "qwen2", "cohere2", "smollm3"])
def test_patterns_are_there_where_the_op_keeps_none(name: str) -> None:
    """SDPA gives transformers no attentions, and a prompt without padding no mask either."""
    fused, eager = zoo.build(name, attn="sdpa"), zoo.build(name)
    assert not any(x is not None for x in attentions(fused, ids_of(name)) or ())
    model = jf.Model(fused, max_num_seqs=3)
    prompts = [ids_of(name, length, seed=length) for length in (PROMPT_TOKENS, 5, 9)]
    for found in (model.run(prompts, patterns, max_tokens=3), [model.run(prompts[0], patterns, max_tokens=3)]):
        for prompt, result in zip(prompts, found, strict=False):
            whole = attentions(eager, prompt + result.token_ids[:-1])
            for step, layers in enumerate(result.returned):
                rows = slice(0, len(prompt)) if step == 0 else slice(len(prompt) + step - 1, len(prompt) + step)
                for layer, pattern in enumerate(layers):
                    want = whole[layer][:, :, rows, : len(prompt) + step]
                    assert_close(pattern, want, "attention_probabilities", where=f"step {step}, layer {layer}, ")


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_what_is_done_to_the_last_token_moves_no_earlier_one(attn: str) -> None:
    """As it does where listening to attention costs a model its causal mask."""

    def block(m: jf.Model, t: Any, *, edits: bool) -> Any:
        if edits:
            m.layers[0].layer_input[:, -1] += 3.0
        rows = []
        for layer in m.layers:
            if edits:
                layer.attention_queries[:, :, -1] *= 2.0
            rows.append(layer.attention_probabilities)
        return m.layers[-1].layer_output, rows

    model = jf.Model(zoo.build("llama", attn=attn))
    (plain, _), (edited, rows) = (
        model.run(ids_of("llama"), lambda m, t, edits=edits: block(m, t, edits=edits)).returned
        for edits in (False, True)
    )
    assert edited[:, :-1].equal(plain[:, :-1])
    assert not edited[:, -1].allclose(plain[:, -1], atol=0.1)
    assert all((pattern.triu(1) == 0).all() for pattern in rows)


UNMASKED = "jackfield_test_unmasked"


@pytest.fixture
def unmasked() -> Iterator[None]:
    yield
    AttentionInterface._global_mapping.pop(UNMASKED, None)


@pytest.mark.usefixtures("unmasked")
def test_an_op_registered_without_a_mask_shows_no_pattern_that_it_does_not_use() -> None:
    """Its name alone costs the model its mask: the future is seen, which the served pattern would deny."""
    AttentionInterface.register(UNMASKED, eager_attention_forward)
    hf, ids = zoo.build("llama", attn=UNMASKED, fresh=True), ids_of("llama")
    assert not logits_of(hf, ids).allclose(logits_of(zoo.build("llama"), ids), atol=0.1)
    with pytest.raises(jf.Unavailable, match="more than its arguments tell"):
        jf.Model(hf).run(ids, lambda m, t: m.layers[1].attention_probabilities)


@pytest.mark.usefixtures("unmasked")
def test_an_op_registered_without_a_mask_meets_no_padding() -> None:
    """One that is causal by itself is right for a prompt alone, and would see the padding of a batch."""
    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    hf = zoo.build("llama", attn=UNMASKED, fresh=True)
    prompts = [ids_of("llama", length, seed=length) for length in (PROMPT_TOKENS, 5, 9)]
    padded = torch.tensor([[0] * 7 + prompts[1], prompts[0]])
    with torch.no_grad():
        seen = hf(padded, attention_mask=(padded != 0).long(), position_ids=(padded != 0).cumsum(1).sub(1).clamp(min=0))
    assert not seen.logits[:1, -5:].allclose(logits_of(hf, prompts[1]), atol=0.1)

    def block(m: jf.Model, t: Any) -> Any:
        return [(m.layers[1].attention_probabilities, m.layers[-1].layer_output) for _ in t.iter[:]]

    model = jf.Model(hf, max_num_seqs=3)
    for prompt, result in zip(prompts, model.run(prompts, block, max_tokens=3, ignore_eos=True), strict=True):
        ids = prompt + result.token_ids[:-1]
        whole = attentions(zoo.build("llama"), ids)[1]
        assert_close(result.returned[0][0], whole[:, :, : len(prompt), : len(prompt)], "attention_probabilities")
        assert_close(result.returned[-1][0], whole[:, :, -1:], "attention_probabilities")
        last = model.project_on_vocab(result.returned[-1][1]).detach()
        assert_close(last, logits_of(zoo.build("llama"), ids)[:, -1:], "logits")


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "gpt_neo"])
def test_a_window_counts_the_query_itself(name: str) -> None:
    """A window of 8: query 11 sees keys 4 to 11 and query 8 keys 1 to 8; by one more or fewer it would not."""
    setting = "window_size" if name == "gpt_neo" else "sliding_window"
    layer = 1 if name == "gpt_neo" else 0

    def seen(model: jf.Model) -> Any:
        def block(m: jf.Model, t: Any) -> Any:
            return [m.layers[layer].attention_scores.isfinite()[0, 0] for _ in t.iter[:]]

        prefill, decode = model.run(ids_of(name), block, max_tokens=2, ignore_eos=True).returned
        return [row.nonzero().flatten().tolist() for row in (prefill[11], prefill[8], decode[0])]

    model = jf.Model(zoo.build(name))
    assert model.layers[layer].attention.window == 8
    assert seen(model) == [list(range(4, 12)), list(range(1, 9)), list(range(5, 13))]
    for other in (7, 9):
        wrong = jf.Model(zoo.build(name, **{setting: other}))
        assert seen(wrong) == [list(range(x - other, x)) for x in (12, 9, 13)]


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_a_sink_that_is_changed_moves_the_pattern(name: str) -> None:
    hf = zoo.build(name, fresh=True)
    model, ids = jf.Model(hf), ids_of(name)
    with_sinks = [layer for layer in range(model.num_layers) if model.layers[layer].attention.sinks is not None]

    def block(m: jf.Model, t: Any) -> Any:
        return [(m.layers[i].attention_scores, m.layers[i].attention_probabilities) for i in with_sinks]

    before = model.run(ids, block).returned
    for sinks in (parameter for key, parameter in hf.named_parameters() if "sink" in key):
        sinks.data += 2.0
    after, wanted = model.run(ids, block).returned, attentions(hf, ids)
    (_, first), (scores, moved) = before[0], after[0]
    assert scores.shape[-1] == PROMPT_TOKENS
    assert not moved.allclose(first, atol=1e-2)
    for layer, (scores, pattern) in zip(with_sinks, after, strict=True):
        assert_close(pattern, wanted[layer], "attention_probabilities")
        sinks = model.layers[layer].attention.sinks
        assert sinks is not None
        sink = sinks.detach().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        torch.testing.assert_close(torch.cat([scores, sink], -1).softmax(-1)[..., :-1], pattern, rtol=1e-4, atol=1e-6)
        assert (pattern.sum(-1) < 1).all()
        assert not scores.softmax(-1).allclose(pattern, atol=1e-2)


# -- positions and heads


@pytest.mark.parametrize(
    ("name", "attn", "factor"),
    [
        ("bloom", "eager", 1.0),
        ("bloom/6h", "eager", 1.0),
        ("mpt", "eager", 1.0),
        ("falcon/rw", "eager", 0.5),  # scaled like the products, and added twice (transformers 5.19)
        ("falcon/rw", "sdpa", 0.25),
    ],
)
def test_slopes_of_head_counts_that_are_no_power_of_two(name: str, attn: str, factor: float) -> None:
    """By Press et al. 2022: those of the power below, then every other one of the power above."""
    model = jf.Model(zoo.build(name, attn=attn))
    heads = model.num_heads
    below = 2 ** math.floor(math.log2(heads))
    own = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    naive = [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]

    def block(m: jf.Model, t: Any) -> Any:
        layer = m.layers[1]
        products = layer.attention_queries @ layer.attention_keys.transpose(-1, -2) * layer.attention.scale
        return layer.attention_scores - products

    (bias,) = model.run(ids_of(name), block).returned
    steps = bias[:, -1, 1:] - bias[:, -1, :-1]  # the origin of the bias is a convention
    slopes = factor * torch.tensor(own + between)
    torch.testing.assert_close(steps, slopes[:, None].expand_as(steps), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.layers[1].attention.alibi_slopes, slopes)
    assert slopes.allclose(factor * torch.tensor(naive)) == (heads == below)


def test_attentions_are_numbered_as_the_layers_are() -> None:
    """A hybrid gives one attention for four layers, and its index is not the layer's."""
    hf, ids = zoo.build("qwen3_next"), ids_of("qwen3_next")
    model = jf.Model(hf)
    (wanted,) = attentions(hf, ids)
    found = model.run(ids, lambda m, t: m.layers[3].attention_probabilities).returned
    assert_close(found, wanted, "attention_probabilities")
    for layer in (0, 1, 2):
        assert model.support(layer)["layer_output"] is None
        with pytest.raises(jf.Unavailable, match="no softmax attention on this layer"):
            model.run(ids, lambda m, t, layer=layer: m.layers[layer].attention_probabilities)


@pytest.mark.parametrize("name", ["smollm3", "cohere2"])
def test_a_layer_without_rotation_attends_with_its_projection(name: str) -> None:
    hf, ids = zoo.build(name), ids_of(name)
    projected: list[Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _a, out: projected.append(out))
        for layer in hf.model.layers
    ]
    logits_of(hf, ids)
    for hook in hooks:
        hook.remove()
    queries = jf.Model(hf).run(ids, lambda m, t: [layer.attention_queries for layer in m.layers]).returned
    flat = [x.transpose(1, 2).flatten(2) for x in queries]
    same = [x.allclose(raw, rtol=1e-5, atol=1e-6) for x, raw in zip(flat, projected, strict=True)]
    assert same == [False, False, False, True]


# -- edits


@pytest.mark.parametrize("grad", [True, False], ids=["with grad", "without grad"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "phi3", "gpt_neox"])
def test_a_part_of_a_fused_projection_is_edited_in_place(name: str, grad: bool) -> None:
    """torch refuses to change an output of `split` in place while it records gradients."""
    model, ids = jf.Model(zoo.build(name)), ids_of(name)

    def block(m: jf.Model, t: Any, *, edits: bool) -> Any:
        if edits:
            m.layers[0].attention_queries[:, 0] = 0
        return m.layers[0].attention_probabilities

    with torch.set_grad_enabled(grad):
        plain, edited = (
            model.run(ids, lambda m, t, edits=edits: block(m, t, edits=edits)).returned for edits in (False, True)
        )
    assert edited[:, 1:].equal(plain[:, 1:])
    seen = plain[0, 0] > 0
    torch.testing.assert_close(edited[0, 0], seen / seen.sum(-1, keepdim=True))
    assert not plain[0, 0].allclose(edited[0, 0], atol=0.05)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_block_skipped_on_the_prompt_alone_is_as_by_hand(layer: int) -> None:
    """Positions go on from the prompt's length, also where the first block, whose cache has it, was skipped."""
    hf, ids = zoo.build("llama"), ids_of("llama")

    def hand_on(_module: Any, args: tuple[Any, ...], output: Any) -> Any:
        return args[0] if args[0].shape[1] > 1 else output

    hook = hf.model.layers[layer].register_forward_hook(hand_on)
    try:
        wanted = hf.generate(
            torch.tensor([ids]),
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        hook.remove()

    def block(m: jf.Model, t: Any) -> Any:
        found = []
        for step in t.iter[:]:
            if step == 0:
                m.layers[layer].skip()
            found.append((t.positions.tolist(), m.logits[0]))
        return found

    result = jf.Model(hf).run(ids, block, max_tokens=4, ignore_eos=True)
    assert result.token_ids == wanted.sequences[0, len(ids) :].tolist()
    assert [at for at, _ in result.returned] == [list(range(len(ids))), *([len(ids) + i] for i in range(3))]
    for (_, got), want in zip(result.returned, wanted.logits, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    plain = jf.Model(hf).run(ids, lambda m, t: m.logits).returned
    assert not plain[0].allclose(wanted.logits[0], atol=0.1)


# -- generation


def test_saves_outlive_a_generation_that_ends_early() -> None:
    """An open loop over the steps, with the model's own end of sequence, also beside an event loop."""
    hf, ids = zoo.build("llama", fresh=True), ids_of("llama")
    free = jf.Model(hf).run(ids, max_tokens=6, ignore_eos=True).token_ids
    hf.generation_config.eos_token_id = free[2]
    kept = free[: free.index(free[2]) + 1]
    model = jf.Model(hf)

    def block(m: jf.Model, t: Any) -> Any:
        rows = [m.layers[1].layer_output.shape[1] for _ in t.iter[:]]
        t.save(after=len(rows))
        return rows

    for result in (model.run(ids, block, max_tokens=6), asyncio.run(model.arun(ids, block, max_tokens=6))):
        assert result.token_ids == kept
        assert result.finish_reason == "stop"
        assert result.returned == [len(ids)] + [1] * (len(kept) - 1)
        assert result.saved["after"] == len(kept) < len(free)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "cohere", "granite"])
def test_logits_are_one_row_and_the_others_are_to_be_had(name: str) -> None:
    """A forward gives the head all positions and `generate` one: the named value is one, on every step."""
    hf, ids = zoo.build(name), ids_of(name)
    model = jf.Model(hf)

    def block(m: jf.Model, t: Any) -> Any:
        return [(m.project_on_vocab(m.layers[-1].layer_output), m.logits) for _ in t.iter[:]]

    result = model.run(ids, block, max_tokens=2, ignore_eos=True)
    whole = logits_of(hf, ids + result.token_ids[:1])
    (prompt, first), (last, second) = result.returned
    assert first.shape == second.shape == (1, 1, model.vocab_size)
    assert_close(prompt, whole[:, :-1], "logits")
    assert_close(first, whole[:, -2:-1], "logits")
    for row in (last, second):
        assert_close(row, whole[:, -1:], "logits")
    unnormed = model.run(ids, lambda m, t: m.project_on_vocab(m.layers[-1].layer_output, norm=False)).returned
    assert (unnormed - prompt).abs().max() > 0.1 * prompt.abs().max()


def test_a_single_pass_refuses_what_it_would_ignore() -> None:
    model = jf.Model(zoo.build("llama"))
    with (
        pytest.raises(jf.InvalidRequest, match="max_new_tokens is no sampling argument here: write max_tokens"),
        model.trace(ids_of("llama"), max_new_tokens=5),
    ):
        pass


# -- what is left of it


@torch.no_grad()
def test_a_model_that_was_looked_at_generates_as_before() -> None:
    """On gemma 2, whose layers differ; against a copy that nobody touched."""
    touched, untouched = zoo.build("gemma2", fresh=True), zoo.build("gemma2", fresh=True)
    model, ids = jf.Model(touched), ids_of("gemma2")
    texts = [str(part) for part in (model, model.layers, model.layers[0], model.layers[0].attention)]
    assert all(texts)
    assert model.layers[0].attention.attn is not None
    dir(model.layers[0].attention), model.support(), model.layers[1].support()

    def block(m: jf.Model, t: Any) -> Any:
        for _ in t.iter[:]:
            m.layers[0].attention_scores.zero_()
            m.layers[1].attention.attn.output.zero_()
            logits = m.logits
        return logits

    model.run(ids, block, max_tokens=2)
    edited = model.run(ids, block).returned
    given = torch.tensor([ids])
    one, other = (hf.generate(given, max_new_tokens=5, do_sample=False) for hf in (touched, untouched))
    assert one.equal(other)
    assert logits_of(touched, ids).equal(logits_of(untouched, ids))
    assert list(touched.state_dict()) == list(untouched.state_dict())
    assert [sorted(vars(x)) for x in touched.modules()] == [sorted(vars(x)) for x in untouched.modules()]
    assert not edited.allclose(logits_of(untouched, ids)[:, -1:], atol=1e-2), "these edits show nothing"
