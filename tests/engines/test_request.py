"""Sampling arguments, limits."""

import dataclasses

import numpy as np
import pytest

from jackfield.engines.request import Limits, Sampling, admit
from jackfield.errors import InvalidRequest, RequestTooLong

LIMITS = Limits(vocab_size=128, context=16, setting="n_positions of its configuration")


def test_defaults_are_those_of_a_trace() -> None:
    sampling = Sampling.parse()
    assert (sampling.max_tokens, sampling.temperature, sampling.plain) == (1, 0.0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens is no sampling argument here: write max_tokens"),
        ({"temperatur": 0}, "temperatur is no sampling argument. Did you mean 'temperature'"),
        ({"do_sample": True}, "temperature decides"),
        ({"num_beams": 4}, "no beam search"),
        ({"eos_token_id": 2}, "stop_token_ids"),
        ({"frobnicate": 1}, "The names are vLLM's: n, max_tokens"),
    ],
)
def test_an_unknown_argument_is_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Sampling.parse(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", None),
        ("max_tokens", "4"),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2.5),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", 3),
        ("stop_token_ids", 2),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", [-1]),
        ("bad_words", "word"),
        ("logit_bias", [3]),
        ("logit_bias", {3: "much"}),
        ("logit_bias", {"three": 1.0}),
        ("allowed_token_ids", [1.5]),
        ("logprobs", -2),
        ("detokenize", 1),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name}=.*: it has to be"):
        Sampling.parse(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens=3 is more than max_tokens=2"),
        ({"n": 2}, "n=2 with temperature=0.0"),
        ({"stop": "x", "detokenize": False}, "need detokenize=True"),
        ({"allowed_token_ids": []}, "leaves no token"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Sampling.parse(**arguments)


def test_what_vllm_takes_is_taken() -> None:
    sampling = Sampling.parse(
        temperature=1, top_k=-1, max_tokens=np.int64(3), top_p=np.float32(0.5), stop="end", logit_bias={"7": 2}
    )
    assert sampling.temperature == 1.0
    assert sampling.max_tokens == 3
    assert sampling.top_p == 0.5
    assert sampling.stop == ("end",)
    assert sampling.logit_bias == {7: 2.0}


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 1},
        {"bad_words": ["x"]},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
    ],
)
def test_an_argument_that_can_change_the_token_is_not_plain(arguments: dict[str, object]) -> None:
    assert not Sampling.parse(**arguments).plain


def test_the_arguments_that_cannot_change_the_token_are_plain() -> None:
    """Every field is on one side: a new one has to be put on it."""
    changing = {"temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"}
    changing |= {"bad_words", "logit_bias", "allowed_token_ids"}
    harmless = {"n", "max_tokens", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"}
    harmless |= {"include_stop_str_in_output", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens"}
    harmless |= {"spaces_between_special_tokens"}
    assert changing | harmless == {field.name for field in dataclasses.fields(Sampling)}
    assert Sampling.parse(top_k=1, top_p=0.5, min_p=0.5, seed=3, max_tokens=9, stop="x", logprobs=2).plain


def test_each_sample_has_a_seed_of_its_own() -> None:
    seeded = Sampling.parse(n=3, temperature=1.0, seed=5).samples()
    assert [(each.n, each.seed) for each in seeded] == [(1, 5), (1, 6), (1, 7)]
    assert [each.seed for each in Sampling.parse(n=2, temperature=1.0).samples()] == [None, None]


def test_an_engine_refuses_by_name_what_it_cannot_honour() -> None:
    Sampling.parse(max_tokens=3).refuse(("prompt_logprobs",), "transformers")
    with pytest.raises(InvalidRequest, match="prompt_logprobs=0: the transformers engine cannot honour it"):
        Sampling.parse(prompt_logprobs=0).refuse(("prompt_logprobs",), "transformers")


def test_a_prompt_that_just_fits_is_admitted() -> None:
    admit(range(3, 15), Sampling.parse(max_tokens=4), LIMITS)
    admit(range(3, 100), Sampling.parse(max_tokens=400), Limits(128, None, ""))


@pytest.mark.parametrize(
    ("ids", "arguments", "error", "message"),
    [
        ([], {}, InvalidRequest, "no tokens: give at least one"),
        ([5, 128], {}, InvalidRequest, "Token id 128 in the prompt: the vocabulary is 0 to 127"),
        ([-1], {}, InvalidRequest, "Token id -1"),
        ([5], {"logit_bias": {128: 1.0}}, InvalidRequest, "128 in logit_bias"),
        ([5], {"allowed_token_ids": [500]}, InvalidRequest, "500 in allowed_token_ids"),
        ([5] * 13, {"max_tokens": 4}, RequestTooLong, r"13 prompt .*max_tokens=4 make 17.*holds 16 \(n_positions"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    ids: list[int], arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        admit(ids, Sampling.parse(**arguments), LIMITS)
