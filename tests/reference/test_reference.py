"""The reference against transformers itself, against the identities of its values, and against known mistakes."""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests import zoo
from tests.reference.compare import assert_close, assert_records_close, row_error, row_errors
from tests.reference.edits import OF_THE_MODEL, WRITABLE, edited_record, edited_tokens
from tests.reference.identities import BROKEN, IDENTITIES, TWICE, calls
from tests.reference.mutants import MUTANTS, reattended, unchanged
from tests.reference.record import Step, record

PROMPT_TOKENS = 12
"""More than the zoo's windows of 8, so that they drop keys in the prompt as well."""
STEPS = 6
EDITED = ("llama", "gpt2", "gemma2", "mixtral", "gpt_oss", "granite", "bloom", "olmo2", "qwen3_next", "granite_swa")

WITHOUT_ROTATION = {"gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "mpt"}
SCALED_BY_ROTATION = {"gpt_oss", "llama4_text"}
"""YaRN changes lengths, and Llama 4 normalises after it rotates."""

each_model = pytest.mark.parametrize("name", zoo.NAMES)
each_edited_model = pytest.mark.parametrize("name", EDITED)
each_mutant = pytest.mark.parametrize(
    ("mistake", "name"), [(mistake, name) for mistake, mutant in MUTANTS.items() for name in mutant.models]
)


@cache
def right(name: str) -> list[Step]:
    return record(zoo.build(name), name, zoo.prompt(name, PROMPT_TOKENS), STEPS)


def everything_so_far(name: str, step: int) -> Tensor:
    return torch.cat([done.input_ids for done in right(name)[: step + 1]], dim=1)


# Against transformers.


@each_model
def test_generates_what_generate_does(name: str) -> None:
    ids = zoo.prompt(name, PROMPT_TOKENS)
    generated = zoo.build(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    tokens = generated.sequences[0, PROMPT_TOKENS:].tolist()
    assert tokens == [step.next_token for step in right(name)]
    for logits, step in zip(generated.logits, right(name), strict=True):
        # Not bit by bit: a CPU's matmul depends on where its operands lie in memory.
        assert_close(step.root["logits"], logits[None], "logits", tolerance=1e-6)


@each_model
def test_stream_is_the_hidden_states_of_transformers(name: str) -> None:
    if name == "gemma3n_text":
        pytest.skip("its hidden states are all of AltUp's streams, or their mean")
    model, step = zoo.build(name), right(name)[0]
    states = model(step.input_ids, output_hidden_states=True).hidden_states
    for layer, values in enumerate(step.layers):
        assert_close(values["layer_input"], states[layer], "layer_input", tolerance=1e-6)
    final_norm = step.root["final_norm_output"]
    if final_norm.shape == states[-1].shape and name != "opt":  # OPT projects what its norm gives
        assert_close(final_norm, states[-1], "final_norm_output", tolerance=1e-6)


@each_model
def test_pattern_is_the_attentions_of_transformers(name: str) -> None:
    if zoo.family(name) == "granite_swa":
        pytest.skip("its attentions leave out the sink, which scales the output afterwards")
    step = right(name)[0]
    attentions = zoo.build(name)(step.input_ids, output_attentions=True).attentions
    suffix = "/0" if name == "diffllama" else ""
    ours = [values[key] for values in step.layers if (key := f"attention_probabilities{suffix}") in values]
    assert len(ours) == len(attentions)
    for got, want in zip(ours, attentions, strict=True):
        assert_close(got, want, "attention_probabilities", tolerance=1e-6)


@each_model
def test_generated_rows_are_the_last_rows_of_one_pass(name: str) -> None:
    """Prefill and decode give what one pass over all tokens gives: so the key axis is absolute, window or not."""
    last = right(name)[-1]
    whole = record(zoo.build(name), name, everything_so_far(name, last.index), 1)[0]
    for layer, values in enumerate(last.layers):
        for value in ("layer_output", "attention_queries", "attention_queries_prerotary"):
            if value in values:
                _assert_last_row(values[value], whole.layers[layer][value], value)
        for value in ("attention_scores", "attention_probabilities"):
            if value in values:
                assert values[value].shape[-1] == PROMPT_TOKENS + last.index
                assert_close(values[value], whole.layers[layer][value][:, :, -1:], value)


def _assert_last_row(got: Tensor, whole: Tensor, value: str) -> None:
    axis = 2 if "queries" in value else 1
    assert_close(got, whole.narrow(axis, whole.shape[axis] - 1, 1), value)


# Against itself.


@each_model
@pytest.mark.parametrize("identity", IDENTITIES)
def test_identities_hold(name: str, identity: str) -> None:
    errors = [row_error(computed, recorded, value) for value, computed, recorded in IDENTITIES[identity](right(name))]
    if (identity, zoo.family(name)) in BROKEN:
        assert max(errors) > 1e-2, f"{name} is said to break {identity!r}, and does not"
    else:
        assert max(errors, default=0.0) <= 2e-6


@each_model
def test_layers_that_attend_twice_number_their_calls(name: str) -> None:
    suffixes = {calls(values) for values in right(name)[0].layers if "attention_premix" in values}
    assert suffixes == ({("/0", "/1")} if zoo.family(name) in TWICE else {("",)})


@each_model
def test_rotation_leaves_position_zero_alone(name: str) -> None:
    """At position 0 the rotary embedding is the identity, so before and after are one row; later rows turn."""
    turned = set()
    for values in right(name)[0].layers:
        for value in ("queries", "keys"):
            before = values.get(f"attention_{value}_prerotary")
            after = values.get(f"attention_{value}", values.get(f"attention_{value}/0"))
            if before is None or after is None:
                continue
            first_before, first_after = before[:, :, :1], after[:, :, :1]
            if zoo.family(name) == "deepseek_v3":  # it rotates pairs of neighbours, and lays them out as two halves
                first_before, first_after = first_before.sort().values, first_after.sort().values
            if name not in SCALED_BY_ROTATION:
                assert_close(first_before, first_after, f"attention_{value}", tolerance=1e-5)
            turned.add(not torch.allclose(before, after, rtol=1e-4))
    assert (True in turned) == (zoo.family(name) not in WITHOUT_ROTATION and name != "falcon/rw")


@pytest.mark.parametrize("name", ["smollm3", "cohere2", "llama"])
def test_layers_without_rotation_are_the_projection(name: str) -> None:
    last = right(name)[0].layers[-1]
    same = torch.equal(last["attention_queries"], last["attention_queries_prerotary"])
    assert same == (name != "llama")


@pytest.mark.parametrize(("name", "window"), [("mistral", 8), ("gemma2", 8), ("gpt_oss", 8), ("gemma4_text", 4)])
def test_windows_count_the_query_itself(name: str, window: int) -> None:
    for step in right(name):
        scores = step.layers[0]["attention_scores"]
        seen = scores.isfinite().sum(-1)
        assert torch.equal(seen, (step.positions + 1).clamp(max=window).expand_as(seen))
        assert (step.layers[0]["attention_probabilities"][scores.isneginf()] == 0).all()


def test_sinks_take_their_share() -> None:
    sums = right("gpt_oss")[0].layers[0]["attention_probabilities"].sum(-1)
    assert ((sums > 0) & (sums < 1)).all()


def test_only_eager_models_are_a_reference() -> None:
    with pytest.raises(ValueError, match="eager attention, and this model runs 'sdpa'"):
        record(zoo.build("llama", attn="sdpa"), "llama", zoo.prompt("llama", 3), 1)


def test_hooks_are_gone_afterwards() -> None:
    model = zoo.build("llama", fresh=True)
    clean = model(zoo.prompt("llama", 8)).logits
    edited_tokens(model, "llama", zoo.prompt("llama", 8), "layer_output", 0, lambda x: 2 * x, 2)
    assert torch.equal(model(zoo.prompt("llama", 8)).logits, clean)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Against mistakes.


@pytest.mark.parametrize("name", sorted({name for mutant in MUTANTS.values() for name in mutant.models}))
def test_attending_again_without_a_mistake_is_the_record(name: str) -> None:
    if any(facts is not None and facts.scale is None for facts in right(name)[0].facts):
        pytest.skip("does its own maths: no mutant attends again on it")
    again = reattended(unchanged)(zoo.build(name), name, right(name))
    names = ("attention_scores", "attention_probabilities", "attention_head_outputs")
    assert_records_close(again, right(name), names, tolerance=2e-6)


@each_mutant
def test_comparison_rejects(mistake: str, name: str) -> None:
    mutant = MUTANTS[mistake]
    wrong = mutant.mutate(zoo.build(name), name, right(name))
    for value in mutant.spoils:
        with pytest.raises(AssertionError, match=value):
            assert_records_close(wrong, right(name), (value,))


def test_rows_are_held_to_their_own_size() -> None:
    want = torch.ones(1, 4, 8)
    want[0, 0] = 22_000.0
    got = want.clone()
    got[0, 2] = 0.0
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4
    assert row_errors(got, want, "layer_output").tolist() == [0.0, 0.0, 1.0, 0.0]
    with pytest.raises(AssertionError, match=r"layer_output: row 2 of 4 is 1.00e\+00 from the reference"):
        assert_close(got, want, "layer_output")


def test_each_query_of_each_head_is_a_row() -> None:
    want = torch.rand(1, 2, 3, 5)
    got = want.clone()
    got[0, 1, 2] *= 1.5
    assert row_errors(got, want, "attention_probabilities").nonzero().tolist() == [[5]]


@pytest.mark.parametrize("hole", [-torch.inf, torch.nan, torch.inf])
def test_holes_must_coincide(hole: float) -> None:
    want = torch.rand(1, 1, 2, 4)
    want[0, 0, 0, 3] = -torch.inf
    got = want.clone()
    assert row_error(got, want, "attention_scores") == 0.0
    got[0, 0, 1, 0] = hole
    with pytest.raises(AssertionError, match="its -inf or NaN are not where the reference has them"):
        assert_close(got, want, "attention_scores")


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"layer_output: shape \(1, 1, 8\), the reference has \(1, 4, 8\)"):
        assert_close(torch.ones(1, 1, 8), torch.ones(1, 4, 8), "layer_output")


def test_alibi_is_compared_without_each_querys_constant() -> None:
    want = right("bloom")[0].layers[0]["attention_scores"]
    origin = torch.arange(want.shape[2])[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None, None]
    with pytest.raises(AssertionError, match="attention_scores"):
        assert_close(want - origin, want, "attention_scores")
    assert_close(want - origin, want, "attention_scores", alibi=True)
    slanted = want + 0.01 * torch.arange(want.shape[3])
    with pytest.raises(AssertionError, match="attention_scores"):
        assert_close(slanted, want, "attention_scores", alibi=True)


# Edits.

BREAKS = {
    "layer_input": {"stream"},
    "layer_output": {"contributions"},
    "attention_scores": {"scores"},
    "attention_probabilities": {"patterns"},
    "attention_head_outputs": {"head outputs"},
}
"""An edit is felt by whoever reads the value next; only the way it came about no longer adds up."""


def _places(name: str) -> list[tuple[str, int | None]]:
    """Each value that can be edited, in the last layer but one that has it, or its only one."""
    layers = right(name)[0].layers
    places: list[tuple[str, int | None]] = []
    for value in WRITABLE:
        having = [i for i, values in enumerate(layers) if value in values]
        if value in OF_THE_MODEL:
            places.append((value, None))
        elif having:
            places.append((value, having[-2:][0]))
    return places


def _attending_layer(name: str) -> int:
    return next(layer for value, layer in _places(name) if value == "attention_scores" and layer is not None)


@pytest.mark.slow
@each_edited_model
def test_edits_reach_the_next_reader(name: str) -> None:
    model, ids = zoo.build(name), zoo.prompt(name, PROMPT_TOKENS)
    for value, layer in _places(name):
        noise = torch.Generator().manual_seed(0)
        edited = edited_record(
            model, name, ids, value, layer, lambda x, g=noise: x + 0.3 * torch.rand(x.shape, generator=g), 2
        )
        assert not torch.equal(edited[0].root["logits"], right(name)[0].root["logits"]), value
        for identity in IDENTITIES.keys() - BREAKS.get(value, set()):
            for what, computed, recorded in IDENTITIES[identity](edited):
                assert row_error(computed, recorded, what) <= 1e-5, (value, identity)


@each_edited_model
def test_edits_that_change_nothing_change_no_bit(name: str) -> None:
    model, ids = zoo.build(name), zoo.prompt(name, PROMPT_TOKENS)
    for value, layer in _places(name):
        same = edited_tokens(model, name, ids, value, layer, lambda x: x * 1.0, 2)
        assert torch.equal(same.logits, torch.cat([step.root["logits"][0] for step in right(name)[:2]])), value


@each_edited_model
def test_masked_keys_stay_masked_whatever_is_written(name: str) -> None:
    layer = _attending_layer(name)
    model, ids = zoo.build(name), zoo.prompt(name, PROMPT_TOKENS)
    zeros = edited_record(model, name, ids, "attention_scores", layer, torch.zeros_like, 2)
    ones = edited_record(model, name, ids, "attention_probabilities", layer, torch.ones_like, 2)
    for scored, weighed in zip(zeros, ones, strict=True):
        masked = weighed.layers[layer]["attention_scores"].isneginf()
        assert (scored.layers[layer]["attention_probabilities"][masked] == 0).all()
        values = weighed.layers[layer]["attention_cached_values"].nan_to_num(nan=0.0)
        heads = masked.shape[1]
        sums = (~masked).float() @ values.repeat_interleave(heads // values.shape[1], dim=1)
        assert_close(weighed.layers[layer]["attention_head_outputs"], sums.transpose(1, 2), "attention_head_outputs")


@each_edited_model
def test_rows_with_nothing_left_to_see_write_zeros(name: str) -> None:
    layer = _attending_layer(name)
    model, ids = zoo.build(name), zoo.prompt(name, PROMPT_TOKENS)
    blind = edited_record(model, name, ids, "attention_scores", layer, lambda x: x - torch.inf, 2)
    for step in blind:
        assert (step.layers[layer]["attention_head_outputs"] == 0).all()


def test_edited_keys_stay_in_the_cache() -> None:
    ids = zoo.prompt("llama", PROMPT_TOKENS)
    edited = edited_record(zoo.build("llama"), "llama", ids, "attention_keys", 1, lambda x: x + 1.0, 3)
    written = torch.cat([step.layers[1]["attention_keys"] for step in edited], dim=2)
    assert torch.equal(edited[-1].layers[1]["attention_cached_keys"], written)


def test_edited_logits_choose_the_token() -> None:
    def only_five(logits: Tensor) -> Tensor:
        return logits.fill_(0.0).index_fill_(-1, torch.tensor([5]), 9.0)

    ids = zoo.prompt("llama", PROMPT_TOKENS)
    assert edited_tokens(zoo.build("llama"), "llama", ids, "logits", None, only_five, 3).token_ids == [5, 5, 5]


@pytest.mark.parametrize(
    ("name", "value", "layer", "message"),
    [
        ("llama", "attention_head_results", 0, "not a value that can be edited"),
        ("llama", "logits", 0, "not a value that can be edited"),
        ("llama", "layer_output", None, "not a value that can be edited"),
        ("llama", "router_logits", 0, "showed 'router_logits' 0 times in 1 steps"),
        ("deepseek_v3", "attention_keys", 0, "the cache does not hold attention_keys"),
    ],
)
def test_impossible_edits_are_refused(name: str, value: str, layer: int | None, message: str) -> None:
    model: PreTrainedModel = zoo.build(name)
    with pytest.raises(ValueError, match=message):
        edited_tokens(model, name, zoo.prompt(name, 3), value, layer, lambda x: x, 1)
