"""Every value's place in every model of the zoo and in models that nobody named, against raw hooks of our own."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import jackfield as jf
from jackfield.engines.transformers.anatomy import read_anatomy
from jackfield.errors import UnsupportedModel
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, Formula, Missing, Projection
from jackfield.values.families.family import Family
from tests import zoo
from tests.engines.transformers import odd_models
from tests.engines.transformers.odd_models import draw
from tests.engines.transformers.raw_formulas import (
    assert_rows_close,
    evaluate,
    heads_before,
    projections_of,
    read_formulas,
    received,
    self_scores,
)

DENSE = {"router_logits"}
ROUTED = {"mlp_activations"}
PARALLEL = {"router_logits", "layer_mid"}
AFTER = {"router_logits", "attention_norm_output", "mlp_norm_output"}

ABSENT: Mapping[str, set[str] | list[set[str]]] = {
    "gpt_neox": PARALLEL,
    "gptj": PARALLEL,
    "codegen": PARALLEL,
    "falcon/7b": PARALLEL,
    "falcon/40b": PARALLEL,
    "cohere": PARALLEL,
    "cohere2": PARALLEL,
    "phi": PARALLEL,
    "stablelm": PARALLEL,
    "olmo2": AFTER,
    "olmo3": AFTER,
    "exaone4": AFTER,
    "mixtral": ROUTED,
    "gpt_oss": ROUTED,
    "qwen3_next": ROUTED,
    "dbrx": ROUTED,
    "qwen3_moe": [DENSE, ROUTED, DENSE, ROUTED],
    "llama4_text": [DENSE, ROUTED, DENSE, ROUTED],
    "deepseek_v3": [DENSE, ROUTED, ROUTED, ROUTED],
    "mimo_v2_flash": [DENSE, ROUTED, ROUTED, ROUTED],
}
"""Values that a layer does not have; one set for all layers, or one per layer. Any other model is DENSE."""

LAYER_VALUES = {
    "layer_input",
    "attention_norm_output",
    "attention_output",
    "layer_mid",
    "mlp_norm_output",
    "router_logits",
    "mlp_activations",
    "mlp_output",
    "layer_output",
}
BROKEN = {"gemma3n_text", "gemma4_text"}
ROTATION_THEN_NORM = {"llama4_text"}

FALCON = {"falcon/7b", "falcon/40b", "falcon/rw"}
BY_HAND = {"gpt2/upcast", "bloom", "bloom/6h", "mpt", "codegen", "gptj", "gpt_neo", *FALCON}
"""Attention that does its own softmax, under the eager implementation."""


@pytest.fixture(scope="module", params=zoo.NAMES)
def named(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel, Anatomy]:
    model = zoo.build(request.param)
    return request.param, model, read_anatomy(model)


def test_every_value_is_there_or_missing_as_the_family_has_it(named):
    name, _, anatomy = named
    absent = ABSENT.get(name, DENSE)
    expected = absent if isinstance(absent, list) else [absent] * len(anatomy.layers)
    assert [missing_of(layer.values) for layer in anatomy.layers] == expected
    assert all(set(layer.values) == LAYER_VALUES for layer in anatomy.layers)
    assert missing_of(anatomy.values) == set()
    assert set(anatomy.broken) == ({"residual_stream"} if name in BROKEN else set())


def test_sums_hold_on_a_prompt_that_was_not_read(named):
    name, model, anatomy = named
    values = evaluate(model, anatomy, zoo.prompt(name, 9))
    for layer in values:
        if "layer_mid" in layer and name != "gemma3n_text":
            assert_rows_close(layer["layer_input"] + layer["attention_output"], layer["layer_mid"])
        if name not in BROKEN:
            total = layer["layer_input"] + layer["attention_output"] + layer["mlp_output"]
            assert_rows_close(total, layer["layer_output"])
    for above, below in pairwise(values):
        assert_rows_close(above["layer_output"], below["layer_input"])


def test_norms_feed_their_sublayers(named):
    name, model, anatomy = named
    for layer in anatomy.layers:
        norms = [layer.values["attention_norm_output"], layer.values["mlp_norm_output"]]
        paths = [layer.attention_path, layer.mlp_path]
        for norm, path in zip(norms, paths, strict=True):
            if isinstance(norm, Formula) and path is not None:
                taken = Formula(Site(path, Port.INPUT), flat=norm.flat)
                made, arrived = read_formulas(model, [norm, taken], zoo.prompt(name, 9))
                assert torch.equal(made, arrived), layer.path


def test_neurons_project_back_to_what_the_mlp_gives(named):
    name, model, anatomy = named
    for layer in anatomy.layers:
        neurons = layer.values["mlp_activations"]
        if isinstance(neurons, Formula):
            projection = Formula(Site(neurons.site.path, Port.OUTPUT), flat=neurons.flat)
            entering, leaving = read_formulas(model, [neurons, projection], zoo.prompt(name, 9))
            assert_rows_close(model.get_submodule(neurons.site.path)(entering), leaving)
            assert entering.shape[-1] != model.config.get_text_config().hidden_size or name == "mpt"


def test_heads_before_rotation_have_the_scores_of_a_token_with_itself(named):
    """A rotation turns a token's query and key alike: their product stays, but for one factor of the whole model."""
    name, model, anatomy = named
    seen = received(model, zoo.prompt(name, 9))
    for layer in anatomy.layers:
        attention = layer.attention
        if name in ROTATION_THEN_NORM or isinstance(attention, Missing) or attention.path not in seen:
            continue
        before = [heads_before(model, found, zoo.prompt(name, 9)) for found in projections_of(attention)]
        if any(heads is None for heads in before):
            assert name in BROKEN, "only layers that share another's keys have none of their own"
            continue
        own, after = self_scores(*before), self_scores(*seen[attention.path])
        factor = float((own * after).sum() / (own * own).sum())
        assert_rows_close((factor * own)[0], after[0])
        assert factor == pytest.approx(1.0, abs=1e-4) or name == "gpt_oss"  # YaRN multiplies lengths


def test_attention_that_does_not_go_through_the_interface_is_told_apart(named):
    name, _, anatomy = named
    told = {layer.attention.dispatched for layer in anatomy.layers if isinstance(layer.attention, AttentionAnatomy)}
    assert told == {name not in BY_HAND}


@pytest.mark.parametrize(
    ("name", "layer", "facts"),
    [
        ("llama", 0, {"num_heads": 4, "num_kv_heads": 2, "d_head": 16, "scale": 0.25, "window": None}),
        ("gpt2/inv", 2, {"scale": 0.25 / 3}),
        ("gpt2/upcast", 2, {"scale": 0.25 / 3}),
        ("gpt2/noscale", 1, {"scale": 1.0}),
        ("gpt_bigcode", 0, {"num_kv_heads": 1, "output_projection": "transformer.h.0.attn.c_proj"}),
        ("opt", 0, {"scale": 1.0}),
        ("gpt_neo", 0, {"scale": 1.0, "window": None}),
        ("gpt_neo", 1, {"scale": 1.0, "window": 8, "path": "transformer.h.1.attn.attention"}),
        ("gptj", 0, {"scale": 0.25, "num_heads": 4}),
        ("codegen", 0, {"scale": 0.25, "num_heads": 4}),
        ("bloom/6h", 0, {"scale": 0.25, "num_heads": 6, "num_kv_heads": 6}),
        ("mpt", 0, {"scale": 0.25, "num_heads": 4}),
        ("falcon/7b", 0, {"scale": 0.25, "num_kv_heads": 1}),
        ("falcon/40b", 0, {"scale": 0.25, "num_kv_heads": 4}),
        ("falcon/rw", 0, {"scale": 0.25, "num_kv_heads": 4}),
        ("gemma2", 0, {"scale": 24**-0.5, "window": 8, "softcap": 2.0}),
        ("gemma2", 1, {"scale": 24**-0.5, "window": None, "softcap": 2.0}),
        ("granite", 0, {"scale": 0.9}),
        ("qwen2", 1, {"window": None}),
        ("qwen2", 2, {"window": 8}),
        ("vaultgemma/allfull", 0, {"window": None}),
        ("llama4_text", 0, {"window": None}),
        ("mistral", 3, {"window": 8}),
        ("cohere2", 2, {"window": 8}),
        ("cohere2", 3, {"window": None}),
        ("diffllama", 0, {"calls": 2}),
        ("deepseek_v3", 0, {"d_head": 24, "d_value": 20, "num_kv_heads": 4, "cache_layer": None}),
        ("mimo_v2_flash", 1, {"d_head": 24, "d_value": 16, "num_kv_heads": 4}),
        ("gemma4_text", 4, {"cache_layer": 3}),
        ("gemma4_text", 5, {"cache_layer": 2, "d_head": 32}),
        ("dbrx", 1, {"path": "transformer.blocks.1.norm_attn_norm.attn", "cache_layer": 1}),
    ],
)
def test_attention_facts_are_those_of_the_call(name, layer, facts):
    attention = read_anatomy(zoo.build(name)).layers[layer].attention
    assert isinstance(attention, AttentionAnatomy)
    assert {fact: getattr(attention, fact) for fact in facts} == {
        fact: pytest.approx(value) if isinstance(value, float) else value for fact, value in facts.items()
    }


def test_a_layer_without_softmax_attention_says_so_and_still_has_its_sublayer():
    layers = read_anatomy(zoo.build("qwen3_next")).layers
    assert [isinstance(layer.attention, Missing) for layer in layers] == [True, True, True, False]
    assert isinstance(layers[0].attention, Missing)
    assert layers[0].attention.reason.startswith("no softmax attention on this layer: Qwen3NextGatedDeltaNet")
    assert layers[0].values["attention_output"] == Formula(Site("model.layers.0.linear_attn", Port.OUTPUT))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (odd_models.OddByExponents, r"^the attention of ByExponents is not understood: .* sum to 1 .*such as exp"),
        (odd_models.OddWithSink, r"^the attention of WithSink is not understood: its softmax, over \[1, 4, \d+, \d+\]"),
        (odd_models.OddSmoothing, "^no softmax attention on this layer: Smoothing mixes its tokens without one$"),
    ],
)
def test_an_attention_that_is_not_understood_is_not_told_to_be_none(kind, reason):
    layer = read_anatomy(draw(kind)).layers[0]
    assert isinstance(layer.attention, Missing)
    assert re.search(reason, layer.attention.reason)
    assert layer.values["attention_output"] == Formula(Site("tower.0.mixer", Port.OUTPUT), factor=0.5)


@pytest.mark.parametrize(
    ("name", "layer", "site", "flat"),
    [
        ("mixtral", 0, Site("model.layers.0.mlp.gate", Port.PROJECT), True),
        ("gpt_oss", 0, Site("model.layers.0.mlp.router", Port.PROJECT), True),
        ("deepseek_v3", 1, Site("model.layers.1.mlp.gate", Port.PROJECT), True),
        ("llama4_text", 1, Site("model.layers.1.feed_forward.router", Port.PROJECT), True),
        ("dbrx", 0, Site("transformer.blocks.0.ffn.router.layer", Port.OUTPUT), True),
    ],
)
def test_router_logits_are_at_the_product_that_selects(name, layer, site, flat):
    assert read_anatomy(zoo.build(name)).layers[layer].values["router_logits"] == Formula(site, flat=flat)


@pytest.mark.parametrize("name", ["granite", "granite_swa"])
def test_a_multiplier_is_the_configurations_own_number(name):
    values = read_anatomy(zoo.build(name)).layers[0].values
    assert [values[key].factor for key in ("attention_output", "mlp_output")] == [0.22, 0.22]


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("granite", "attention_output", lambda formula: replace(formula, factor=1.0)),
        ("gemma2", "attention_output", lambda _: Formula(Site("model.layers.0.self_attn", Port.OUTPUT))),
        ("bloom", "mlp_output", lambda _: Formula(Site("transformer.h.0.mlp", Port.OUTPUT))),
    ],
)
def test_the_sum_of_a_wrong_place_does_not_hold(name, value, wrong):
    """Mutants: the multiplier left out, the sublayer before its post-norm, the sublayer with the residual in it."""
    model = zoo.build(name)
    anatomy = read_anatomy(model)
    first = anatomy.layers[0]
    mutant = replace(first, values={**first.values, value: wrong(first.values[value])})
    (layer,) = evaluate(model, replace(anatomy, layers=(mutant,)), zoo.prompt(name, 9))
    with pytest.raises(AssertionError):
        assert_rows_close(layer["layer_input"] + layer["attention_output"] + layer["mlp_output"], layer["layer_output"])


READ_ALIKE = ["llama", "gpt2", "gemma2", "granite", "mixtral", "bloom", "deepseek_v3", "dbrx", "opt"]


@pytest.mark.parametrize("name", READ_ALIKE)
@pytest.mark.parametrize(
    "change",
    [{"hot": False}, {"dtype": torch.bfloat16}, {"attn": "sdpa"}],
    ids=["default weights", "bfloat16", "sdpa"],
)
def test_weights_dtype_and_implementation_do_not_matter(name, change):
    if "attn" in change and name in BY_HAND:
        pytest.skip("this family has no other implementation")
    assert places(read_anatomy(zoo.build(name, **change))) == places(read_anatomy(zoo.build(name)))


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "gpt2", "dbrx"])
def test_a_model_is_left_as_it_was(name):
    model = zoo.build(name, fresh=True).train()
    model.get_submodule("lm_head").eval()
    before = state(model)
    read_anatomy(model)
    assert state(model) == before


def test_a_model_that_fails_is_left_as_it_was_too():
    model = draw(odd_models.Raising)
    before = state(model)
    with pytest.raises(UnsupportedModel, match=r"its forward raised KeyError: 'pixel_values'.*runs on plain token ids"):
        read_anatomy(model)
    assert state(model) == before


@pytest.mark.parametrize("kind", [odd_models.OddModel, odd_models.OddByHand])
def test_a_model_that_nobody_named_is_read_by_structure(kind):
    model = draw(kind)
    anatomy = read_anatomy(model)
    block = "tower.1"
    assert anatomy.layers[1].values == {
        "layer_input": Formula(Site(block, Port.INPUT, "x")),
        "attention_norm_output": Formula(Site(f"{block}.n1", Port.OUTPUT)),
        "attention_output": Formula(Site(f"{block}.mixer", Port.OUTPUT), factor=0.5),
        "layer_mid": Formula(Site(f"{block}.n2", Port.INPUT)),
        "mlp_norm_output": Formula(Site(f"{block}.n2", Port.OUTPUT)),
        "router_logits": Missing("this layer has no router: its MLP is dense"),
        "mlp_activations": Formula(Site(f"{block}.ff.2", Port.INPUT)),
        "mlp_output": Formula(Site(f"{block}.ff", Port.OUTPUT), factor=0.5),
        "layer_output": Formula(Site(block, Port.OUTPUT)),
    }
    assert (anatomy.final_norm, anatomy.output_head) == ("last", "unwords")
    assert anatomy.values["token_embeddings"] == Formula(Site("words", Port.OUTPUT))
    assert (anatomy.layers[1].attention_path, anatomy.layers[1].mlp_path) == (f"{block}.mixer", f"{block}.ff")
    (_, layer, _) = evaluate(model, anatomy, torch.tensor([[5, 9, 2, 77, 31]]))
    assert_rows_close(layer["layer_input"] + layer["attention_output"] + layer["mlp_output"], layer["layer_output"])


def test_attention_through_the_interface_is_found_under_any_name():
    attention = read_anatomy(draw(odd_models.OddModel)).layers[0].attention
    site = Site("tower.0.mixer.vkq", Port.OUTPUT)
    assert isinstance(attention, AttentionAnatomy)
    assert replace(attention, unheld={}) == AttentionAnatomy(
        path="tower.0.mixer",
        dispatched=True,
        num_heads=4,
        num_kv_heads=2,
        d_head=12,
        d_value=12,
        scale=0.31,
        window=5,
        output_projection="tower.0.mixer.back",
        queries_prerotary=Projection(site, 12, first=4, count=4),
        keys_prerotary=Projection(site, 12, first=2, count=2),
    )


@pytest.mark.parametrize("kind", [odd_models.OddByHand, odd_models.OddTurning])
def test_attention_by_hand_is_found_under_any_name(kind):
    """With a rotary embedding in a module of its own, the heads before it are the projection's all the same."""
    attention = read_anatomy(draw(kind)).layers[0].attention
    site = Site("tower.0.mixer.everything", Port.OUTPUT)
    assert isinstance(attention, AttentionAnatomy)
    assert (attention.dispatched, attention.scale, attention.num_heads, attention.num_kv_heads) == (False, 0.27, 4, 4)
    assert attention.queries_prerotary == Projection(site, 12, first=0, count=1, groups=4)
    assert attention.keys_prerotary == Projection(site, 12, first=1, count=1, groups=4)
    assert attention.output_projection == "tower.0.mixer.back"


def test_keys_that_a_module_repeats_are_one_head_per_group():
    loaded = draw(odd_models.OddRepeating)
    loaded.config.num_hidden_layers = 3  # `generate` makes its cache by it
    attention = read_anatomy(loaded).layers[0].attention
    assert isinstance(attention, AttentionAnatomy)
    assert (attention.num_heads, attention.num_kv_heads) == (4, 2)
    assert attention.keys_prerotary == Projection(Site("tower.0.mixer.tell", Port.OUTPUT), 12, count=2)
    given: list[torch.Tensor] = []
    with loaded.tower[0].mixer.give.register_forward_hook(lambda module, args, made: given.append(made)):
        values = jf.Model(loaded).run([5, 9, 2, 77, 31], lambda m, t: m.layers[0].attention_values).returned
    assert values.equal(given[-1].unflatten(-1, (2, 12)).transpose(1, 2))


def test_what_two_streams_do_not_have_is_missing_with_a_reason():
    anatomy = read_anatomy(draw(odd_models.OddTwoStreams))
    layer = anatomy.layers[0]
    stream = {"layer_input", "attention_output", "layer_mid", "mlp_output", "layer_output"}
    assert stream <= missing_of(layer.values)
    assert "several tensors, of which none is the residual stream" in str(layer.values["layer_input"])
    assert "no tensor is what this sublayer adds" in str(layer.values["attention_output"])
    assert anatomy.broken["residual_stream"].startswith("what layers [0, 1, 2] do to their stream is not the sum")
    assert layer.values["attention_norm_output"] == Formula(Site("tower.0.n1", Port.OUTPUT))
    assert isinstance(layer.attention, AttentionAnatomy)
    assert layer.attention.queries_prerotary == Projection(
        Site("tower.0.mixer.everything", Port.OUTPUT), 12, first=0, count=1, groups=4
    )


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UnsupportedModel, match=r"in NoBlocks for a ModuleList of decoder blocks.*State its path"):
        read_anatomy(draw(odd_models.NoBlocks))


def test_what_a_family_states_stands_above_what_is_found():
    family = Family(
        values={
            "mlp_output": Missing("told so"),
            "layer_mid": Formula(Site("mlp", Port.INPUT)),
            "layer_input": Formula(Site("", Port.INPUT), stream=1),
        },
        root={"final_norm_output": Formula(Site("model.norm", Port.INPUT))},
        broken={"residual_stream": "told so"},
    )
    anatomy = read_anatomy(zoo.build("llama"), family)
    assert anatomy.layers[2].values["mlp_output"] == Missing("told so")
    assert anatomy.layers[2].values["layer_mid"] == Formula(Site("model.layers.2.mlp", Port.INPUT))
    assert anatomy.layers[2].values["layer_input"] == Formula(Site("model.layers.2", Port.INPUT), stream=1)
    assert anatomy.values["final_norm_output"] == Formula(Site("model.norm", Port.INPUT))
    assert anatomy.broken == {"residual_stream": "told so"}


def test_a_family_may_state_a_place_only_where_there_is_a_module():
    family = Family(values={"mlp_output": Formula(Site("ffn", Port.OUTPUT))})
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM has no module 'model.layers.0.ffn'.*below the block"):
        read_anatomy(zoo.build("llama"), family)


def missing_of(values: Mapping[str, Formula | Missing]) -> set[str]:
    return {name for name, value in values.items() if isinstance(value, Missing)}


def places(anatomy: Anatomy) -> list[Any]:
    return [anatomy.values, anatomy.broken, *[(layer.values, layer.attention) for layer in anatomy.layers]]


def state(model: PreTrainedModel) -> Any:
    """What must not change: modes, hooks, weights, random numbers, the table of attention functions."""
    modules = [
        (path, module.training, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
        for path, module in model.named_modules()
    ]
    weights = {name: tensor.clone().tolist() for name, tensor in model.state_dict().items()}
    table = (sorted(vars(ALL_ATTENTION_FUNCTIONS)), dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
    return modules, weights, torch.get_rng_state().tolist(), table
