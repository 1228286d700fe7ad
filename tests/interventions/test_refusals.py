"""What cannot be applied is refused when it is made, or before anything runs, with what to write instead."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jackfield as jf
from jackfield.interleave.worker import Worker
from jackfield.interventions.block import InterventionBlock
from jackfield.interventions.plan import Plan
from tests.interventions.by_hand import numbers

V = numbers(8)  # as wide as the scripted engine's stream


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jf.Steer("layers.0.layer_outptu", V), "^Steer, site: .*Did you mean 'layer_output'"),
        (lambda: jf.Steer("layers.0.resid_post", V), "no value 'resid_post'.*Did you mean 'layer_output'"),
        (lambda: jf.Steer("layer_output", V), r'a value of each layer; say which, as in "layers.18.layer_output"'),
        (lambda: jf.Steer("layers.0.logits", V), "logits is a value of the model, and not of its layers"),
        (lambda: jf.Steer("layers.-1.layer_output", V), "'-1' says no layers; write 18"),
        (lambda: jf.Steer("layers.4-2.layer_output", V), "'4-2' says no layers"),
        (lambda: jf.Steer("layers.a.layer_output", V), "'a' says no layers"),
        (lambda: jf.Steer("layers.0", V), "no value ''"),
        (lambda: jf.Steer("", V), "no value ''"),
        (lambda: jf.Steer(3, V), "3 is no site"),
        (lambda: jf.Steer("layers.0.layer_output", V[None]), "^Steer, vector: it has shape \\(1, 8\\)"),
        (lambda: jf.Steer("layers.0.layer_output", V.long()), "dtype torch.int64; write a vector"),
        (lambda: jf.Steer("layers.0.layer_output", V + torch.nan), "entries that are not finite"),
        (lambda: jf.Steer("layers.0.layer_output", V.to_sparse()), "write a vector .* that is dense"),
        (lambda: jf.Steer("layers.0.layer_output", V.to("meta")), "write a vector .* and has numbers"),
        (lambda: jf.from_json("[" * 5000), "This is not JSON"),
        (lambda: jf.Steer("layers.0.layer_output", [1.0]), "it is a list; write a vector \\[width\\]: a tensor"),
        (lambda: jf.Steer("layers.0.layer_output", V, "2"), "^Steer, scale: '2' is no finite number"),
        (lambda: jf.Steer("layers.0.layer_output", V, torch.inf), "inf is no finite number"),
        (lambda: jf.Steer("layers.0.layer_output", V, True), "True is no finite number"),
        (lambda: jf.Steer("layers.0.layer_output", V, 1.0, 1), "^Steer, relative: 1 is neither True nor False"),
        (lambda: jf.Project("layers.0.layer_output", V[:0].view(0, 8)), "shape \\(0, 8\\)"),
        (lambda: jf.Project("layers.0.layer_output", V.view(1, 1, 8)), "shape \\(1, 1, 8\\)"),
        (lambda: jf.Scale("layers.0.layer_output", None), "^Scale, factor: None is no finite number"),
        (lambda: jf.Scale("layers.0.attention_premix", 0, heads=[]), "^Scale, heads: \\[\\] says no heads"),
        (lambda: jf.Scale("layers.0.attention_premix", 0, heads=[1, 1]), "each head once"),
        (lambda: jf.Scale("layers.0.attention_premix", 0, heads=-1), "counted from 0"),
        (lambda: jf.Scale("layers.0.attention_premix", 0, heads="*"), "or None for all"),
        (lambda: jf.Skip([]), "^Skip, layers: \\[\\] says no layers"),
        (lambda: jf.Skip([1, 1]), "each layer once"),
        (lambda: jf.Skip(1.5), "1.5 says no layers"),
        (lambda: jf.Skip("0-999999999999"), "says no layers"),
        (
            lambda: jf.Capture("logits", "max"),
            "^Capture, reduce: 'max' is no way to reduce; write None",
        ),
        (lambda: jf.Probe("logits", V, ""), "^Probe, bias: it is a str"),
        (lambda: jf.Probe("logits", V, reduce="max"), "^Probe, reduce: 'max' is no way to reduce"),
        (lambda: jf.Probe("logits", V, top_k=0), "^Probe, top_k: 0 products are none; write a whole number from 1"),
        (lambda: jf.Probe("logits", V, top_k=1.5), "^Probe, top_k: 1.5 is no number of products"),
    ],
)
def test_what_no_model_could_do(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(jf.InvalidIntervention, match=message):
        make()


Given = Callable[[jf.Model], jf.Intervention]
REFUSED: list[tuple[Given, str]] = [
    (lambda m: jf.Steer("layers.99.layer_output", V), "^Steer at layers.99.layer_output: there is no layer 99"),
    (lambda m: jf.Skip([0, 99]), "^Skip of layers \\(0, 99\\): there is no layer 99: the model has layers 0 to"),
    (lambda m: jf.Steer("layers.0.layer_output", numbers(m.hidden_size + 1)), "vector has .* entries, and a row of"),
    (lambda m: jf.Replace("layers.0.attention_keys", numbers(m.head_dim - 1)), "value has .* entries, and a row of"),
    (lambda m: jf.Project("logits", numbers(2, 3)), "directions has 3 entries, and a row of logits is"),
    (
        lambda m: jf.Probe("layers.0.layer_output", numbers(2, m.hidden_size), numbers(3)),
        "bias has 3 entries, and",
    ),
    (lambda m: jf.Project("layers.0.layer_output", torch.zeros(2, m.hidden_size)), "so that they span nothing"),
    (lambda m: jf.Scale("layers.0.attention_head_results", 0), "layers.0.attention_head_results can be read only"),
    (lambda m: jf.Scale("next_token_probabilities", 0), "next_token_probabilities can be read only"),
    (lambda m: jf.Scale("layers.0.layer_output", 0, heads=[0]), "layers.0.layer_output has no heads"),
    (lambda m: jf.Scale("logits", 0, heads=[0]), "logits has no heads"),
    (lambda m: jf.Scale("layers.0.attention_premix", 0, heads=99), "there is no head 99 at .*: heads are 0 to"),
    (lambda m: jf.Knockout(0, heads=99), "^Knockout of layers \\(0,\\): there is no head 99"),
    (lambda m: jf.Capture("layers.0.attention_keys", heads=m.num_kv_heads), "there is no head"),
    (lambda m: jf.Capture("layers.0.attention_cached_keys"), "has no row per token of a step; take attention_keys"),
    (lambda m: jf.Steer("layers.0.attention_scores", V), "vector needs rows of one width"),
    (lambda m: jf.Probe("layers.0.layer_output", numbers(2, m.hidden_size), top_k=3), "top_k=3 of 2 directions"),
    (lambda m: jf.Probe("layers.0.attention_probabilities", V), "directions needs rows of one width"),
    (
        lambda m: jf.Capture("layers.0.router_logits"),
        "^Capture at .*router_logits is not available: .*router",
    ),
    (lambda m: jf.Scale("layers.*.router_logits", 0), "layers.0.router_logits is not available"),
    (
        lambda m: jf.Scale("layers.0.layer_output", 0, positions=[3, 9]),
        "position 9 is never reached: the prompt has 7",
    ),
    (lambda m: jf.Scale("layers.0.layer_output", 0, positions=range(9, 12)), "position 9 is never reached"),
    (lambda m: jf.Knockout(0, queries=9), "position 9 is never reached.* max_tokens is 3, so positions are 0 to 8"),
    (lambda m: jf.Knockout(0, keys=[9]), "position 9 is never reached"),
    (lambda m: jf.Scale("logits", 2, positions=[0, 5]), "rows from the prompt's last token on, which is position 6"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_this_model_cannot_do(
    model: jf.Model, prompts: list[list[int]], given: Given, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has run: no block was begun, for no prompt of the call."""
    monkeypatch.setattr(Worker, "__init__", lambda *_: pytest.fail("a block was begun"))
    with pytest.raises(jf.InvalidIntervention, match=message):
        model.generate(prompts[0], [jf.Skip(0), given(model)], max_tokens=3)
    with pytest.raises(jf.InvalidIntervention, match=message):
        model.generate([prompts[0], prompts[0]], [[jf.Skip(0)], [given(model)]], max_tokens=3)


def test_two_cannot_keep_under_one_name(fake: jf.Model) -> None:
    two = [jf.Capture("layers.*.layer_output"), jf.Probe("layers.1.layer_output", V)]
    with pytest.raises(jf.InvalidIntervention, match=r"two interventions keep Result.saved\['layers.1.layer_output'\]"):
        fake.generate([6, 7], two)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (jf.Skip(0), "write one list for all prompts"),
        ("Skip", "write one list for all prompts"),
        (None, "write one list for all prompts"),
        ([3], "3 is no intervention; interventions are Steer, Project"),
        ([jf.Skip(0), [jf.Skip(0)]], "holds both interventions and lists of them"),
        ([[jf.Skip(0)]], "holds 1 lists, and there are 2 prompts"),
        ([[jf.Skip(0)], [None]], "None is no intervention"),
    ],
)
def test_what_is_no_list_of_interventions(fake: jf.Model, given: Any, message: str) -> None:
    with pytest.raises(jf.InvalidIntervention, match=message):
        fake.generate([[6, 7], [8, 9]], given)


def test_a_name_for_what_is_shared_is_text(fake: jf.Model) -> None:
    with pytest.raises(jf.InvalidRequest, match="has some text as its name"):
        fake.share(V, name="")


def test_interventions_are_frozen(fake: jf.Model) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        jf.Skip(0).layers = (1,)  # pyright: ignore[reportAttributeAccessIssue]


def test_the_block_is_data(fake: jf.Model) -> None:
    """It goes anywhere by value, with interventions as they are used: float32, bases orthonormal, names resolved."""
    fake.share(V.bfloat16(), name="joy")
    given = (jf.Steer("layers.*.layer_output", "joy"), jf.Project("layers.0.layer_output", V), jf.Capture("logits"))
    block = Plan.of(given, fake._engine, fake._named).block(5, 2)
    again = pickle.loads(pickle.dumps(block))
    assert isinstance(again, InterventionBlock)
    assert again == block
    steer, project, _ = again.interventions
    assert steer.vector.equal(V.bfloat16().float())
    torch.testing.assert_close(project.directions.T @ project.directions, torch.outer(V, V) / V.norm() ** 2)
    assert block.names == {"layer_output", "logits"}
