"""The native Llama as an engine: every value against transformers' eager model, company, errors, options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any  # what a block returns

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.engines.inline import InlineChannel
from jackfield.engines.llama import checkpoint, layers
from jackfield.engines.llama.layers import Transformer
from jackfield.engines.transformers.sample import sample_model
from tests import zoo
from tests.engines.llama.native import CASES, both
from tests.engines.tiny_tokenizers import words
from tests.reference.compare import TOLERANCE, row_error
from tests.reference.record import Step, record

CLOSE = TOLERANCE[torch.float32]
STEPS = 4
ROOT = [value.name for value in jf.values() if value.on == "model" and value.name != "input_ids"]
IN_ORDER = (
    *("layer_input", "attention_norm_output", "attention_values", "attention_cached_keys", "attention_queries"),
    *("attention_keys_prerotary", "attention_keys", "attention_queries_prerotary", "attention_cached_values"),
    *("attention_scores", "attention_probabilities", "attention_head_outputs", "attention_premix"),
    *("attention_head_results", "attention_output", "layer_mid", "mlp_norm_output", "mlp_activations", "mlp_output"),
    "layer_output",
)
"""A layer's values in an order that the contract allows: what attention is given comes in any."""
Patch = pytest.MonkeyPatch


def saved(folder: Path, name: str = "llama", **over: Any) -> Path:
    """A heated model of transformers with a tokenizer, in a folder."""
    zoo.build(name, fresh=True, **over).save_pretrained(folder)
    words(zoo.VOCAB).save_pretrained(folder)
    return folder


def native(folder: Path, **options: Any) -> jf.Model:
    return jf.Model(folder, engine="llama", **{"max_seq_len": 64, **options})


def everything(m: jf.Model, t: Any) -> list[dict[tuple[str, int | None], Tensor]]:
    """Every value of every step."""
    steps: list[dict[tuple[str, int | None], Tensor]] = []
    for _ in t.iter[:]:
        found: dict[tuple[str, int | None], Tensor] = {("token_embeddings", None): m.token_embeddings}
        for number, layer in enumerate(m.layers):
            found |= {(name, number): getattr(layer, name) for name in IN_ORDER}
        found |= {(name, None): getattr(m, name) for name in ROOT[1:]}
        steps.append(found)
    return steps


def errors(found: list[dict[tuple[str, int | None], Tensor]], steps: list[Step]) -> dict[str, float]:
    """For each value, the error of its worst row over all layers and steps."""
    worst: dict[str, float] = {}
    for got, step in zip(found, steps, strict=True):
        for (name, layer), value in got.items():
            want = step.get(name, layer)
            assert want is not None, name
            worst[name] = max(worst.get(name, 0.0), row_error(value, want, name))
    return worst


def held_against_the_reference(case: str, folder: Path) -> dict[str, float]:
    theirs, _ = both(case, folder)
    steps = record(theirs, CASES[case][0], zoo.prompt("llama", 12), STEPS)
    prompt = steps[0].input_ids[0].tolist()
    result = native(folder).run(prompt, everything, max_tokens=STEPS, ignore_eos=True)
    if result.token_ids != [step.next_token for step in steps]:
        return {"token ids": torch.inf}
    return errors(result.returned, steps)


def test_the_order_above_has_every_value() -> None:
    assert {*ROOT, *IN_ORDER} == {value.name for value in jf.values()} - {"input_ids", "router_logits"}


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    found = held_against_the_reference(case, tmp_path)
    assert found.keys() == {*ROOT, *IN_ORDER}
    assert max(found.values()) <= CLOSE, found


@pytest.mark.slow
def test_every_value_of_the_sample_model() -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(sample_model(), dtype=torch.float32, attn_implementation="eager")
    model = jf.Model.demo(engine="llama", max_seq_len=64)
    prompt = model.tokenizer.encode("The capital of France is")
    steps = record(theirs, "llama", torch.tensor([prompt]), 3)
    found = errors(model.run(prompt, everything, max_tokens=3).returned, steps)
    assert max(found.values()) <= CLOSE, found


def rows_from_the_front(patch: Patch) -> None:
    def view(self: InlineChannel, tensor: Tensor, worker: Any) -> Tensor:
        own = tensor[worker.rows.index : worker.rows.index + 1]
        lengths = {"t": worker.rows.num_tokens(worker.step), "k": worker.rows.num_keys(worker.step)}
        for axis, letter in enumerate(self.value.axes.split()):
            own = own.narrow(axis, 0, lengths[letter]) if letter in lengths else own
        return own

    patch.setattr(InlineChannel, "_view", view)


def heads_tiled(patch: Patch) -> None:
    patch.setattr(layers, "repeat_kv", lambda x, n_rep: x.repeat(1, 1, n_rep, 1))


def queries_as_meta_has_them(patch: Patch) -> None:
    patch.setattr(layers, "half_split", lambda x: x)


def decoding_turned_late(patch: Patch) -> None:
    right = Transformer._positions

    def late(self: Transformer, stream: Tensor, start_pos: int, padding: Tensor | None) -> Any:
        turns, mask = right(self, stream, start_pos, padding)
        return (self.freqs_cis[start_pos + 1 : start_pos + 2] if start_pos else turns), mask

    patch.setattr(Transformer, "_positions", late)


def unpermuted(patch: Patch) -> None:
    patch.setattr(checkpoint, "interleaved", lambda x: x)


@pytest.mark.parametrize(
    ("mistake", "case", "spoilt"),
    [
        (rows_from_the_front, "grouped heads", "attention_keys"),
        (heads_tiled, "eight heads", "attention_scores"),
        (queries_as_meta_has_them, "free head width", "attention_queries"),
        (decoding_turned_late, "grouped heads", "attention_scores"),
        (unpermuted, "a head each", "token ids"),
    ],
)
def test_a_mistake_shows(
    mistake: Callable[[Patch], None], case: str, spoilt: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    found = held_against_the_reference(case, tmp_path)
    assert found.get(spoilt, found.get("token ids", 0.0)) > 10 * CLOSE


# Sampling and company.


def test_sampling_is_that_of_the_transformers_engine(tmp_path: Path) -> None:
    """Row by row, from the same seeds, whatever shapes the distribution."""
    folder = saved(tmp_path)
    ours, theirs = native(folder), jf.Model(folder)
    options = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.3, "top_k": 5, "seed": 2},
        {"temperature": 1.0, "top_p": 0.7, "seed": 3},
        {"temperature": 1.0, "min_p": 0.1, "seed": 4, "n": 3, "logprobs": 2},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.4},
        {"logit_bias": {9: 30.0}, "logprobs": 0},
        {"stop": "t9"},
    ]
    for sampling in options:
        prompt = zoo.prompt("llama", 9)[0].tolist()
        one, other = (model.run(prompt, max_tokens=6, **sampling) for model in (ours, theirs))
        assert one.token_ids == other.token_ids, sampling
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        if one.logprobs is not None and isinstance(one.token_ids[0], int):
            for mine, yours in zip(one.logprobs, other.logprobs, strict=True):
                assert mine.keys() == yours.keys()
                assert all(mine[i].logprob == pytest.approx(yours[i].logprob, abs=1e-4) for i in mine)


def test_prompts_that_together_are_longer_than_the_cache_take_turns(tmp_path: Path) -> None:
    model = native(saved(tmp_path), max_seq_len=24)
    long, short = zoo.prompt("llama", 20)[0].tolist(), zoo.prompt("llama", 3)[0].tolist()
    with model.trace(ignore_eos=True) as t:
        with t.invoke(long, max_tokens=4):
            pass
        with t.invoke(short, max_tokens=20):
            pass
    assert [len(result.token_ids) for result in t.results] == [4, 20]
    assert t.results[1].token_ids == model.run(short, max_tokens=20, ignore_eos=True).token_ids


# The cache.


def test_the_cache_is_edited_by_layer_head_and_position(tmp_path: Path) -> None:
    """What is written to one row of it is there on the next step, and nothing else is."""
    model, prompt = native(saved(tmp_path)), zoo.prompt("llama", 6)[0].tolist()

    def block(m: jf.Model, t: Any) -> Any:
        found = []
        for step in t.iter[:]:
            keys, values = m.layers[1].attention_cached_keys, m.layers[1].attention_cached_values
            found.append((keys.clone(), values.clone()))
            if step == 1:
                keys[:, 1, 2] = 5.0
                values[:, 0, 3] = -5.0
        return found

    _, before, after = model.run(prompt, block, max_tokens=3, ignore_eos=True).returned
    for was, now, at, put in zip(before, after, ((1, 2), (0, 3)), (5.0, -5.0), strict=True):
        assert (now[0, at[0], at[1]] == put).all()
        now[0, at[0], at[1]] = was[0, at[0], at[1]]
        assert now[:, :, :-1].equal(was)


def test_the_cache_is_a_buffer_of_each_attention(tmp_path: Path) -> None:
    model, prompt = native(saved(tmp_path), max_batch_size=2), zoo.prompt("llama", 6)[0].tolist()
    keys = model.run(prompt, lambda m, t: m.layers[2].attention_cached_keys).returned
    cache = model.layers[2].attention.cache_k
    assert cache.shape == (2, 64, model.num_kv_heads, model.head_dim)
    torch.testing.assert_close(layers.half_split(cache[:1, :6]).transpose(1, 2), keys)
    assert model.layers[2].attention.cache_v.shape == cache.shape


# Refusals, options, the end.


def test_what_does_not_fit_is_refused_by_the_setting(tmp_path: Path) -> None:
    model = native(saved(tmp_path), max_batch_size=2)
    with pytest.raises(jf.RequestTooLong, match=r"the model holds 64 \(max_seq_len\)"):
        model.run([5] * 60, max_tokens=5)
    with pytest.raises(jf.InvalidRequest, match="n=3 samples run in one batch, and max_batch_size=2"):
        model.run([5], n=3, temperature=1.0)


def test_the_cache_is_no_longer_than_the_model(tmp_path: Path) -> None:
    folder = saved(tmp_path, max_position_embeddings=32)
    assert jf.Model(folder, engine="llama").layers[0].attention.cache_k.shape[1] == 32
    with pytest.raises(jf.InvalidRequest, match="max_seq_len=33: the model was made for 32 positions"):
        native(folder, max_seq_len=33)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("nowhere/nothing", {}, jf.UnknownModel, "there is no such folder here, and as a hub name"),
        (3, {}, jf.UnknownModel, "A int is no model to load"),
        ("", {"max_batchsize": 3}, jf.InvalidRequest, "max_batchsize is no option.*Did you mean 'max_batch_size'"),
        ("", {"max_seq_len": 0}, jf.InvalidRequest, "max_seq_len=0: it has to be a whole number from 1"),
        ("", {"dtype": "float31"}, jf.InvalidRequest, "no floating dtype of torch"),
        ("", {"device": "nowhere"}, jf.InvalidRequest, "device='nowhere' cannot be used"),
        ("", {"family": object()}, jf.InvalidRequest, "the llama engine is one family"),
    ],
)
def test_options_that_are_none(
    model: Any, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        jf.Model(model or saved(tmp_path), engine="llama", **options)


def test_a_folder_with_another_architecture_is_refused_by_its_setting(tmp_path: Path) -> None:
    zoo.build("qwen3", fresh=True).save_pretrained(tmp_path)
    with pytest.raises(jf.UnsupportedModel, match="does not implement model_type='qwen3'"):
        jf.Model(tmp_path, engine="llama")


def test_a_closed_model_is_gone(tmp_path: Path) -> None:
    with native(saved(tmp_path)) as model:
        layer = model.layers[0]
    for use in (lambda: model.run([5, 6]), lambda: model.project_on_vocab(torch.ones(64)), lambda: layer.foo):
        with pytest.raises(jf.EngineDied, match="closed"):
            use()


def test_what_is_projected_has_the_width_of_the_stream(tmp_path: Path) -> None:
    model = native(saved(tmp_path))
    with pytest.raises(jf.EditMismatch, match=r"project_on_vocab takes \[\.\.\., 64\] of torch\.float32; it was given"):
        model.project_on_vocab(torch.ones(3, 5))


def test_a_tokenizer_of_ones_own_or_none(tmp_path: Path) -> None:
    folder, own = saved(tmp_path), words(64)
    assert native(folder, tokenizer=own).tokenizer is own
    bare = native(folder, tokenizer=False)
    assert bare.tokenizer is None
    with pytest.raises(jf.InvalidRequest, match="came without a tokenizer"):
        bare.run("t7 t8")
    for sampling in ({"stop": "t9"}, {"bad_words": ["t9"]}):
        with pytest.raises(jf.InvalidRequest, match=r"needs a tokenizer"):
            bare.run([5], **sampling)
