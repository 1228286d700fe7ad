"""JSON means what was written, runs nothing, and guesses nothing (case A37: formats of different versions)."""

import base64
import json
from typing import Any

import pytest
import safetensors.torch
import torch

import jackfield as jf
from tests.interventions.by_hand import CASES, MAX_TOKENS, by_data, left, numbers, watched

STEER = '{"format": 1, "kind": "Steer", "site": "layers.0.layer_output", "vector": {"shared": "joy"}}'


@pytest.mark.parametrize("case", CASES)
def test_a_trip_through_json_changes_nothing(model: jf.Model, prompts: list[list[int]], case: str) -> None:
    """The list equals what it was, and leaves the same tokens, to the last bit."""
    written = watched(model, CASES[case].data(model))
    read = jf.from_json(jf.to_json(written))
    assert read == written
    arguments: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    one, other = (left(model, model.generate(prompts[0], each, **arguments)[0]) for each in (written, read))
    assert (one.tokens, one.stream.equal(other.stream), one.logits.equal(other.logits)) == (other.tokens, True, True)


KINDS: dict[str, jf.Intervention] = {
    "Steer": jf.Steer("layers.3-5.layer_output", numbers(6).bfloat16(), 0.1, True, positions=[3, range(5, 9, 2)]),
    "Project": jf.Project("layers.*.attention_premix", numbers(2, 6), 0.5, heads=[1, 3]),
    "Scale": jf.Scale("logits", -0.3, positions="last"),
    "Replace": jf.Replace("token_embeddings", numbers(6).double(), positions=0),
    "Skip": jf.Skip("2-4", positions="generated"),
    "Knockout": jf.Knockout("*", queries="last", keys=range(3), heads=0),
    "Capture": jf.Capture("layers.0.attention_scores", "mean"),
    "Probe": jf.Probe("layers.0.layer_output", numbers(2, 6), numbers(2, seed=1)),
    "Probe of the largest": jf.Probe("layers.0.layer_output", numbers(4, 6), reduce="mean", top_k=2),
    "Probe of one": jf.Probe("layers.0.layer_output", numbers(6), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_comes_back(kind: str) -> None:
    one = KINDS[kind]
    again = jf.from_json(one.to_json())
    assert again == one
    assert repr(again) == repr(one)
    assert hash(again) == hash(one)
    assert type(one).from_json(json.loads(one.to_json())) == one
    assert all(again != other for name, other in KINDS.items() if name != kind)


def test_the_form_is_what_the_docs_say() -> None:
    assert json.loads(jf.Knockout("0-1", queries=[4, range(6, 9)], keys="prompt").to_json()) == {
        "format": 1,
        "kind": "Knockout",
        "layers": [0, 1],
        "queries": [4, {"start": 6, "stop": 9, "step": 1}],
        "keys": "prompt",
        "heads": None,
    }


def test_defaults_may_be_left_out() -> None:
    assert jf.from_json(STEER) == jf.Steer("layers.0.layer_output", "joy")


def test_a_name_stays_a_name(model: jf.Model, prompts: list[list[int]]) -> None:
    vector = numbers(model.hidden_size)
    handle = model.share(vector, name="joy of JSON")
    steer = jf.Steer("layers.0.layer_output", handle, 2.0)
    assert json.loads(steer.to_json())["vector"] == {"shared": "joy of JSON"}
    inline = jf.Steer("layers.0.layer_output", vector, 2.0)
    by_name = by_data(model, prompts[0], [jf.from_json(steer.to_json())])
    assert by_name.close_to(by_data(model, prompts[0], [inline]))
    unnamed = jf.Steer("layers.0.layer_output", model.share(vector), 2.0)
    assert jf.from_json(unnamed.to_json()) == inline


def test_an_unknown_name_is_refused_before_anything_runs(model: jf.Model, prompts: list[list[int]]) -> None:
    model.share(numbers(model.hidden_size), name="sorrow")
    with pytest.raises(jf.InvalidIntervention, match=r"nothing is shared as 'sorow' .*Did you mean 'sorrow'"):
        model.generate(prompts[0], [jf.Steer("layers.0.layer_output", "sorow")])
    model.share([1, 2], name="a list")
    with pytest.raises(jf.InvalidIntervention, match="what is shared is a list, and a tensor is needed"):
        model.generate(prompts[0], [jf.Steer("layers.0.layer_output", "a list")])


def encoded(**tensors: torch.Tensor) -> str:
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(STEER), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "This is not JSON"),
        (b"\xff", "This is not JSON"),
        ("3", "is an object with a 'kind'; this is 3"),
        ('[["Steer"]]', "is an object with a 'kind'; this is \\['Steer'\\]"),
        (changed(format=2), "of format 2, and this version of jackfield reads format 1"),
        (changed(format=True), "of format True"),
        (changed(format="1"), "of format '1'"),
        ('{"kind": "Skip", "layers": [0]}', 'add "format": 1'),
        (changed(kind="steer"), "no kind of intervention 'steer'.*Did you mean 'Steer'"),
        (changed(kind=["Steer"]), "no kind of intervention \\['Steer'\\]"),
        (changed(posotions="last"), "Steer has no 'posotions'.*Did you mean 'positions'"),
        ('{"format": 1, "kind": "Steer", "vector": {"shared": "x"}}', "Steer needs 'site'"),
        (changed(vector=[0.1, 0.2]), "Steer, vector: \\[0.1, 0.2\\] is no tensor"),
        (changed(vector="joy"), "Steer, vector: 'joy' is no tensor"),
        (changed(vector={"shared": "x", "more": 1}), "is no tensor"),
        (changed(vector={"safetensors": "!"}), "no base64 of a safetensors file"),
        (changed(vector={"safetensors": "AAAA"}), "no base64 of a safetensors file"),
        (changed(vector={"safetensors": encoded(a=torch.ones(2))}), "hold a, and should hold 'tensor' alone"),
        (changed(vector={"safetensors": encoded(tensor=torch.ones(2, dtype=torch.int64))}), "dtype torch.int64"),
        (changed(vector={"safetensors": encoded(tensor=torch.full((2,), torch.nan))}), "not finite"),
        (changed(scale="4"), "Steer, scale: '4' is no finite number"),
        (STEER[:-1] + ', "scale": NaN}', "Steer, scale: nan is no finite number"),
        (changed(positions=[{"start": 1, "stop": 4}]), "is no range"),
        (changed(positions=[{"start": 1, "stop": 4, "step": 0}]), "is no range"),
        (changed(positions={"start": 1, "stop": 4, "step": 1}), "is no position"),
        (changed(heads=[{"start": 1, "stop": 4, "step": 1}]), "says no heads"),
    ],
)
def test_what_is_refused(text: Any, message: str) -> None:
    with pytest.raises(jf.InvalidIntervention, match=message):
        jf.from_json(text)


def test_one_and_several_are_read_by_what_was_asked() -> None:
    skip = jf.Skip(0)
    assert jf.from_json(jf.to_json([skip])) == [skip]
    assert jf.from_json(jf.to_json(skip)) == skip
    assert jf.from_json("[]") == []
    with pytest.raises(jf.InvalidIntervention, match="a list of interventions; read it with"):
        jf.Skip.from_json(jf.to_json([skip]))
    with pytest.raises(jf.InvalidIntervention, match="This is a Skip, and a Scale was asked for"):
        jf.Scale.from_json(skip.to_json())
    with pytest.raises(jf.InvalidIntervention, match="3 is no intervention"):
        jf.to_json([skip, 3])
