"""What each kind does on every engine: the same as a block that does it by hand."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.interleave.channel import WHOLE, Channel, Selection
from jackfield.interleave.worker import Worker
from jackfield.interventions import positions as position_words
from jackfield.interventions import rows, running
from tests.contract.conftest import Subject
from tests.interventions.by_hand import (
    CASES,
    LENGTH,
    MAX_TOKENS,
    by_block,
    by_data,
    dependent,
    left,
    numbers,
    rows_at,
    watched,
)


@pytest.mark.parametrize("case", CASES)
def test_an_intervention_is_the_block_by_hand(model: jf.Model, prompts: list[list[int]], case: str) -> None:
    data = by_data(model, prompts[0], CASES[case].data(model))
    assert data.close_to(by_block(model, prompts[0], CASES[case].edit(model)))
    assert not data.close_to(by_data(model, prompts[0], []))


def test_each_prompt_of_a_batch_has_its_own(model: jf.Model, prompts: list[list[int]]) -> None:
    """In company as alone, and a prompt without any as it is."""
    lists = [
        [jf.Steer("layers.0.layer_output", numbers(model.hidden_size), 2.0, positions="generated")],
        [],
        [jf.Skip(1, positions="last"), jf.Knockout(0, queries="generated", keys=[0], heads=[0])],
        [jf.Steer("layers.0.layer_output", numbers(model.hidden_size, seed=5), 1.0, positions=[0, 4])],
    ]
    four = [*prompts, prompts[2]]
    lists = [watched(model, each) for each in lists]
    together = model.generate(four, lists, max_tokens=MAX_TOKENS, ignore_eos=True)
    for prompt, own, result in zip(four, lists, together, strict=True):
        (alone,) = model.generate(prompt, own, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert left(model, result).close_to(left(model, alone))


def test_one_list_is_for_all(model: jf.Model, prompts: list[list[int]]) -> None:
    own = watched(model, [jf.Steer("layers.0.layer_output", numbers(model.hidden_size), 2.0, positions="last")])
    together = model.generate(prompts, own, max_tokens=2, ignore_eos=True)
    one_by_one = model.generate(prompts, [own] * len(prompts), max_tokens=2, ignore_eos=True)
    assert [each.token_ids for each in together] == [each.token_ids for each in one_by_one]
    for one, other in zip(together, one_by_one, strict=True):
        assert left(model, one).close_to(left(model, other))


def test_without_interventions_it_is_the_plain_model(model: jf.Model, prompts: list[list[int]]) -> None:
    plain = model.run(prompts, max_tokens=MAX_TOKENS, ignore_eos=True)
    for given in ([], [[], [], []]):
        found = model.generate(iter(prompts), given, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        assert all(each.saved == {} for each in found)


# -- positions (case A36: "from generation on" includes the last prompt token)

EVERY = set(range(LENGTH + MAX_TOKENS - 1))
POSITIONS: dict[str, tuple[Any, set[int]]] = {
    "all": ("all", EVERY),
    "prompt": ("prompt", {0, 1, 2, 3, 4, 5, 6}),
    "last": ("last", {6}),
    "generated": ("generated", {6, 7, 8, 9}),
    "one": (3, {3}),
    "one that is generated": (8, {8}),
    "several": ([0, 9, 2], {0, 2, 9}),
    "a range": (range(5, 8), {5, 6, 7}),
    "a range that goes on": (range(1, 1000, 3), {1, 4, 7}),
    "both": ([range(2), 6, range(8, 10)], {0, 1, 6, 8, 9}),
}


@pytest.mark.parametrize("form", POSITIONS)
def test_positions(model: jf.Model, prompts: list[list[int]], form: str) -> None:
    given, meant = POSITIONS[form]
    vector = numbers(model.hidden_size)

    def edit(m: Any, positions: list[int]) -> None:
        for row in rows_at(positions, meant):
            m.layers[0].layer_output[0, row] += vector

    steered = [jf.Steer("layers.0.layer_output", vector, positions=given)]
    assert by_data(model, prompts[0], steered).close_to(by_block(model, prompts[0], edit))


@pytest.mark.parametrize("form", POSITIONS)
def test_nothing_else_is_read(model: jf.Model, prompts: list[list[int]], form: str, monkeypatch: Any) -> None:
    """Of each step the meant rows of the one value, and of a step without any nothing.

    Of a value for which no engine has a faster way than the block.
    """
    given, meant = POSITIONS[form]
    read: list[tuple[str, int, int]] = []
    kept = Worker.read

    def counting(worker: Worker, channel: Channel, selection: Selection = WHOLE) -> Any:
        found = kept(worker, channel, selection)
        read.append((channel.name.rpartition(".")[2], worker.step, found.shape[1]))
        return found

    monkeypatch.setattr(Worker, "read", counting)
    vector = numbers(model.head_dim)
    arguments: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    model.generate(prompts[0], [jf.Steer("layers.0.attention_head_outputs", vector, positions=given)], **arguments)
    in_prompt = len([position for position in meant if position < LENGTH])
    expected = [("attention_head_outputs", 0, in_prompt)] if in_prompt else []
    expected += [
        ("attention_head_outputs", position - LENGTH + 1, 1) for position in sorted(meant) if position >= LENGTH
    ]
    assert read == expected


def test_a_knockout_reads_no_row_that_sees_none_of_the_keys(
    model: jf.Model, prompts: list[list[int]], monkeypatch: Any
) -> None:
    read: list[tuple[int, ...]] = []
    kept = Worker.read

    def counting(worker: Worker, channel: Channel, selection: Selection) -> Any:
        found = kept(worker, channel, selection)
        read.append(tuple(found.shape))
        return found

    monkeypatch.setattr(Worker, "read", counting)
    model.generate(prompts[0], [jf.Knockout(0, queries="prompt", keys=[4, 5], heads=[1])], max_tokens=3)
    assert read == [(1, 1, 3, LENGTH)]


# -- what is kept


def test_captures_are_the_rows_of_every_step(model: jf.Model, prompts: list[list[int]]) -> None:
    names = ("layer_output", "attention_queries", "attention_keys", "attention_head_outputs", "attention_probabilities")

    def block(m: Any, t: Any) -> Any:
        return [
            [(m.input_ids, m.layers[0].attention_queries.clone(), m.layers[0].attention_keys.clone()),
             (m.layers[0].attention_probabilities, m.layers[0].attention_head_outputs, m.layers[0].layer_output),
             (m.logits, m.next_token_probabilities)]
            for _ in t.iter[:]
        ]  # fmt: skip

    arguments: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    steps = model.run(prompts[0], block, **arguments).returned
    captures = [jf.Capture(f"layers.0.{name}") for name in names]
    more = [jf.Capture(name) for name in ("input_ids", "logits", "next_token_probabilities")]
    saved = model.generate(prompts[0], [*captures, *more], **arguments)[0].saved

    def same(name: str, expected: list[Tensor]) -> None:
        torch.testing.assert_close(saved[name], torch.cat(expected), rtol=1e-4, atol=1e-5)

    same("layers.0.layer_output", [step[1][2][0] for step in steps])
    same("layers.0.attention_head_outputs", [step[1][1][0] for step in steps])
    same("layers.0.attention_queries", [step[0][1][0].transpose(0, 1) for step in steps])
    same("layers.0.attention_keys", [step[0][2][0].transpose(0, 1) for step in steps])
    same("input_ids", [step[0][0][0] for step in steps])
    same("logits", [step[2][0][0] for step in steps])
    same("next_token_probabilities", [step[2][1] for step in steps])
    width = LENGTH + MAX_TOKENS - 1
    padded = [torch.nn.functional.pad(step[1][0][0], (0, width - step[1][0].shape[-1])) for step in steps]
    same("layers.0.attention_probabilities", [each.transpose(0, 1) for each in padded])
    assert all(tensor.device.type == "cpu" for tensor in saved.values())


def test_captured_scores_hold_minus_infinity_for_later_keys(model: jf.Model, prompts: list[list[int]]) -> None:
    capture = jf.Capture("layers.0.attention_scores", heads=[1])
    saved = model.generate(prompts[1], [capture], max_tokens=3, ignore_eos=True)[0].saved[capture.site]
    assert saved.shape == (5, 1, 5)
    assert saved.isneginf()[:, 0].equal(torch.ones(5, 5, dtype=torch.bool).triu(1))


def test_reductions_are_of_all_rows(model: jf.Model, prompts: list[list[int]]) -> None:
    def kept(**options: Any) -> Tensor:
        capture = jf.Capture("layers.1.layer_output", **options)
        return model.generate(prompts[0], [capture], max_tokens=3, ignore_eos=True)[0].saved[capture.site]

    rows_of_all = kept()
    torch.testing.assert_close(kept(reduce="last"), rows_of_all[-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept(reduce="mean"), rows_of_all.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        kept(reduce="mean", positions="prompt"), rows_of_all[:LENGTH].mean(0), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(kept(reduce="last", positions=[2, 4]), rows_of_all[4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["layer_output", "attention_head_outputs", "attention_keys"])
def test_a_probe_is_products_and_a_bias(model: jf.Model, prompts: list[list[int]], name: str) -> None:
    site, width = f"layers.1.{name}", model.hidden_size if name == "layer_output" else model.head_dim
    directions, bias = numbers(3, width), numbers(3, seed=1)
    arguments: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
    captured = model.generate(prompts[0], [jf.Capture(site)], **arguments)[0].saved[site]
    for given, expected in ((bias, bias), (None, 0.0), (2, 2.0)):
        probed = model.generate(prompts[0], [jf.Probe(site, directions, given)], **arguments)[0].saved[site]
        torch.testing.assert_close(probed, captured @ directions.T + expected, rtol=1e-4, atol=1e-4)
        assert probed.dtype == torch.float32


@pytest.mark.parametrize("name", ["layer_output", "attention_head_outputs"])
def test_a_probe_is_reduced_and_its_largest_are_kept(model: jf.Model, prompts: list[list[int]], name: str) -> None:
    """Over all steps; the largest are those of what the reduction left, each beside the direction that it is of."""
    site, width = f"layers.1.{name}", model.hidden_size if name == "layer_output" else model.head_dim
    directions = numbers(6, width)

    def kept(**options: Any) -> dict[str, Tensor]:
        probe = jf.Probe(site, directions, 0.5, **options)
        return model.generate(prompts[0], [probe], max_tokens=3, ignore_eos=True)[0].saved

    products = kept()[site]
    for reduce, expected in ((None, products), ("last", products[-1]), ("mean", products.mean(0))):
        torch.testing.assert_close(kept(reduce=reduce)[site], expected, rtol=1e-4, atol=1e-4)
        largest = kept(reduce=reduce, top_k=2)
        assert list(largest) == [site, f"{site}.indices"]
        torch.testing.assert_close(largest[site], expected.topk(2).values, rtol=1e-4, atol=1e-4)
        found = expected.gather(-1, largest[f"{site}.indices"])
        torch.testing.assert_close(found, largest[site], rtol=1e-4, atol=1e-4)


def test_the_largest_of_a_position_that_never_came_are_none(fake: jf.Model, prompts: list[list[int]]) -> None:
    first = fake.run(prompts[1], max_tokens=1, ignore_eos=True).token_ids
    probe = jf.Probe("layers.0.layer_output", numbers(6, 8), positions=[8], top_k=2)
    arguments: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": first}
    saved = fake.generate(prompts[1], [probe], **arguments)[0].saved
    assert [(each.dtype, tuple(each.shape)) for each in saved.values()] == [
        (torch.float32, (0, 2)),
        (torch.int64, (0, 2)),
    ]


def test_what_is_kept_at_a_site_is_what_stands_there_when_its_turn_comes(
    model: jf.Model, prompts: list[list[int]]
) -> None:
    site, vector = "layers.0.layer_output", numbers(model.hidden_size)
    arguments: dict[str, Any] = {"max_tokens": 1}
    plain = model.generate(prompts[0], [jf.Capture(site)], **arguments)[0].saved[site]
    edit = jf.Steer(site, vector)
    before = model.generate(prompts[0], [jf.Capture(site), edit], **arguments)[0].saved[site]
    after = model.generate(prompts[0], [edit, jf.Capture(site)], **arguments)[0].saved[site]
    torch.testing.assert_close(before, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after, plain + vector, rtol=1e-4, atol=1e-4)


def test_layers_are_kept_each_under_its_own_name(model: jf.Model, prompts: list[list[int]]) -> None:
    saved = model.generate(prompts[1], [jf.Capture("layers.0-1.mlp_output"), jf.Capture("layers.*.layer_mid")])[0].saved
    several = [f"layers.{number}.layer_mid" for number in range(model.num_layers)]
    assert sorted(saved) == sorted(["layers.0.mlp_output", "layers.1.mlp_output", *several])
    assert all(tensor.shape == (3, model.hidden_size) for tensor in saved.values())


def test_a_position_that_never_came_leaves_no_rows(model: jf.Model, prompts: list[list[int]]) -> None:
    """The request ends early: all rows of none are an empty tensor, and none can be reduced."""
    first = model.run(prompts[1], max_tokens=1, ignore_eos=True).token_ids
    arguments: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": first}
    site = "layers.0.attention_head_outputs"
    capture = jf.Capture(site, positions=[8], heads=[1])
    (result,) = model.generate(prompts[1], [capture], **arguments)
    assert result.saved[site].shape == (0, 1, model.head_dim)
    with pytest.raises(jf.NotReached, match="none came before the request ended"):
        model.generate(prompts[1], [jf.Capture(site, reduce="mean", positions=[8])], **arguments)


def test_a_shared_tensor_is_used_by_its_handle_and_by_its_name(model: jf.Model, prompts: list[list[int]]) -> None:
    vector = numbers(model.hidden_size)
    handle = model.share(vector, name="joy")
    assert handle.name == "joy"
    expected = by_data(model, prompts[0], [jf.Steer("layers.0.layer_output", vector)])
    for given in (handle, "joy", model.share(vector)):
        assert by_data(model, prompts[0], [jf.Steer("layers.0.layer_output", given)]).close_to(expected)
    model.share(3 * vector, name="joy")
    assert not by_data(model, prompts[0], [jf.Steer("layers.0.layer_output", "joy")]).close_to(expected)


def test_samples_have_what_they_kept_each(prompts: list[list[int]], engine: Subject) -> None:
    if engine.name == "fake":
        pytest.skip("the scripted engine makes one sample")
    site = "layers.0.layer_output"
    (result,) = engine.model.generate(prompts[1], [jf.Capture(site)], n=2, temperature=1.0, seed=0, max_tokens=2)
    assert [saved[site].shape[0] for saved in result.saved] == [4, 4]


def test_nothing_stays(model: jf.Model, prompts: list[list[int]]) -> None:
    vector = numbers(model.hidden_size)
    watching = weakref.ref(vector)
    model.generate(prompts, [jf.Steer("layers.*.layer_output", vector), jf.Capture("layers.0.layer_output")])
    del vector
    gc.collect()
    assert watching() is None


# -- mutants: each is a mistake that someone makes, and a case that finds it


def late(positions: Any, prompt_length: int, end: int) -> Any:
    if positions == "generated":
        return position_words.Selected(frozenset(), (range(prompt_length, end),))
    return KEPT["select"](positions, prompt_length, end)


KEPT: dict[str, Callable[..., Any]] = {
    "select": running.select,
    "steer": rows.steer,
    "mask": position_words.Selected.mask,
}


def no_norm(x: Tensor, vector: Tensor, scale: float, relative: bool) -> Tensor:
    return KEPT["steer"](x, vector, scale, relative=False)


def normed_as_a_whole(x: Tensor, vector: Tensor, scale: float, relative: bool) -> Tensor:
    return x + scale * (x.norm() if relative else 1.0) * vector


def as_given(directions: Tensor) -> Tensor:
    return directions[:2] / directions[:2].norm(dim=1, keepdim=True)


def scaled_masks(x: Tensor, factor: float) -> Tensor:
    return x * factor


class LastFirst(running.Running):
    def _visits(self, number: int, each: jf.Intervention) -> Any:
        return super()._visits(-number, each)


class EveryHead(running.ValueAt):
    def __init__(self, model: Any, place: Any, heads: Any) -> None:
        super().__init__(model, place, None)


class Backwards(running.Edges):
    def __init__(self, queries: Any, keys: Any) -> None:
        super().__init__(keys, queries)


def one_key_late(self: position_words.Selected, length: int, device: Any) -> Tensor:
    return KEPT["mask"](self, length, device).roll(1)


MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "generated begins one late": (running, "select", late, "steer one head"),
    "relative forgets the norm": (rows, "steer", no_norm, "steer, relative"),
    "relative to all rows": (rows, "steer", normed_as_a_whole, "steer, relative"),
    "directions taken for orthogonal": (rows, "orthonormal", as_given, "project"),
    "masked scores are scaled": (rows, "scale", scaled_masks, "knock out, then scale by 0"),
    "the list backwards": (running, "Running", LastFirst, "two at one site"),
    "all heads": (running, "ValueAt", EveryHead, "scale queries"),
    "queries for keys": (running, "Edges", Backwards, "knock out"),
    "keys one late": (position_words.Selected, "mask", one_key_late, "knock out"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(fake: jf.Model, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, case = MUTANTS[mutant]
    prompt = [6, 20, 13, 28, 9, 17, 30]
    expected = by_block(fake, prompt, CASES[case].edit(fake))
    assert by_data(fake, prompt, CASES[case].data(fake)).close_to(expected)
    monkeypatch.setattr(where, name, wrong)
    if name == "Running":
        monkeypatch.setattr("jackfield.interventions.block.Running", wrong)
    assert not by_data(fake, prompt, CASES[case].data(fake)).close_to(expected)


def test_the_directions_of_the_project_case_depend_on_each_other(fake: jf.Model) -> None:
    assert len(rows.orthonormal(dependent(fake))) == 2
