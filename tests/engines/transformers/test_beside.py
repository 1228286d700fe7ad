"""Scores and pattern computed beside an op leave what the op was given alone."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from tests import zoo

PROMPT = [5, 9, 17, 33]


def reads(model: Any, t: Any) -> list[Tensor]:
    """Scores and pattern of every layer."""
    return [x for layer in model.layers for x in (layer.attention_scores, layer.attention_probabilities)]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_read_leaves_the_mask_of_the_model_as_it_was(attn: str) -> None:
    """One mask goes to every layer: the last sees what a read in the first would have done to it."""
    loaded = zoo.build("llama", attn, fresh=True)
    masks: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        masks.extend(mask.clone() for mask in [kwargs["attention_mask"]] if mask is not None)

    model = jf.Model(loaded)
    with loaded.model.layers[-1].self_attn.register_forward_pre_hook(keep, with_kwargs=True):
        model.run([PROMPT, PROMPT[:2]])
        plain, masks[:] = masks[:], []
        model.run([PROMPT, PROMPT[:2]], reads)
    assert len(masks) == len(plain) > 0
    assert all(one.equal(other) for one, other in zip(masks, plain, strict=True))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad, contextlib.nullcontext])
def test_a_trace_may_stand_in_any_mode(mode: type[AbstractContextManager[Any]]) -> None:
    model = jf.Model(zoo.build("llama"))
    plain = model.run(PROMPT, reads).returned
    with mode():
        inside = model.run(PROMPT, reads).returned
    assert all(one.equal(other) for one, other in zip(plain, inside, strict=True))


def test_autocast_in_the_block_does_not_round_what_it_reads() -> None:
    model, ids = jf.Model(zoo.build("llama")), zoo.prompt("llama", 9)[0].tolist()

    def plain(m: jf.Model, t: Any) -> Any:
        return [layer.attention_probabilities for layer in m.layers]

    def cast(m: jf.Model, t: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [layer.attention_probabilities for layer in m.layers]

    for got, want in zip(model.run(ids, cast).returned, model.run(ids, plain).returned, strict=True):
        assert got.dtype == torch.float32
        assert got.equal(want)
