"""Cached keys and values that are edited: the model goes on as it does when a raw cache of our own changes them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from tests import zoo
from tests.engines.transformers.reading import loaded
from tests.reference.cached import CACHED, cached_edit

pytestmark = pytest.mark.slow

LAYERS = {"qwen3_next": 3, "gpt_oss": 0, "granite_swa": 0, "gpt_neo": 1}
"""Where the second layer has no attention, or no window."""
LENGTH, STEPS = 11, 4
"""Past a window of 8."""

LATENT = ("deepseek_v3", "deepseek_v3/yarn")
"""Their cache holds what keys and values are made of."""

CASES = [(name, value) for name in zoo.NAMES if name not in LATENT for value in CACHED]


def ramp(x: Tensor) -> Tensor:
    """An edit that no symmetry hides: each position, head and channel by a factor of its own. NaN stays."""
    factors = torch.linspace(-0.5, 1.5, x.shape[1] * x.shape[3]).view(1, x.shape[1], 1, x.shape[3])
    return x * (factors + 0.1 * torch.arange(x.shape[2])[:, None].cos())


def run(name: str, block: Any) -> jf.Result:
    return loaded(name).run(zoo.prompt(name, LENGTH, seed=3)[0].tolist(), block, max_tokens=STEPS, ignore_eos=True)


def logits_of(result: jf.Result) -> Tensor:
    return torch.cat([row[0] for row in result.returned])


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}: {value}" for name, value in CASES])
def test_an_edit_of_the_cache_does_what_a_raw_one_does(name: str, value: str) -> None:
    layer = LAYERS.get(name, 1)
    reason = loaded(name).support(layer)[value]
    if reason is not None:
        pytest.skip(reason)

    def edited(m: jf.Model, t: Any) -> Any:
        logits = []
        for _ in t.iter[:]:
            part = m.layers[layer]
            setattr(part, value, ramp(getattr(part, value)))
            logits.append(m.logits)
        return logits

    result = run(name, edited)
    want = cached_edit(zoo.build(name), zoo.prompt(name, LENGTH, seed=3), value, layer, ramp, STEPS)
    assert result.token_ids == want.token_ids
    assert distance(logits_of(result), want.logits) < 1e-4
    plain = run(name, lambda m, t: [m.logits for _ in t.iter[:]])
    assert distance(logits_of(result), logits_of(plain)) > 1e-3, "the edit shows nothing"


@pytest.mark.parametrize("value", CACHED)
@pytest.mark.parametrize("name", LATENT)
def test_what_no_later_step_would_see_is_refused(name: str, value: str) -> None:
    def edited(m: jf.Model, t: Any) -> None:
        getattr(m.layers[1], value).zero_()

    with pytest.raises(jf.Unavailable, match=f"{value} can be read, not edited: the cache of this model does not hold"):
        run(name, edited)


@pytest.mark.parametrize("value", CACHED)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mistral"])
def test_an_edit_that_the_cache_forgets_is_another(name: str, value: str) -> None:
    """The mutant: this step attends to what was edited, and the next ones to what was there before."""
    ids, layer = zoo.prompt(name, LENGTH, seed=3), LAYERS.get(name, 1)
    kept, forgotten = (
        cached_edit(zoo.build(name), ids, value, layer, ramp, STEPS, forgets=forgets) for forgets in (False, True)
    )
    assert kept.logits[0].equal(forgotten.logits[0])
    assert distance(forgotten.logits, kept.logits) > 1e-3


@pytest.mark.parametrize("value", CACHED)
def test_in_place_and_by_rows_is_one_edit(value: str) -> None:
    """On the prompt alone: later steps find it in the cache."""

    def assigned(m: jf.Model, t: Any) -> Any:
        part = m.layers[1]
        setattr(part, value, ramp(getattr(part, value)))
        return [m.logits.clone(), *(m.logits for _ in t.iter[1:])]

    def in_place(m: jf.Model, t: Any) -> Any:
        x = getattr(m.layers[1], value)
        x.copy_(ramp(x))
        return [m.logits.clone(), *(m.logits for _ in t.iter[1:])]

    def by_heads(m: jf.Model, t: Any) -> Any:
        part = m.layers[1]
        whole = ramp(getattr(part, value))
        for head in range(m.num_kv_heads):
            part.write(value, whole[:, [head]], heads=[head])
        return [m.logits.clone(), *(m.logits for _ in t.iter[1:])]

    one, *others = (logits_of(run("llama", block)) for block in (assigned, in_place, by_heads))
    for other in others:
        assert other.equal(one)
