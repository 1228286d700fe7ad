"""Families whose blocks are built differently: the order of their values, and what only the running model knows."""

from functools import cache

import pytest
import torch

import jackfield as jf
from tests import zoo
from tests.engines.tiny_tokenizers import words
from tests.interventions.by_hand import numbers

PROMPT = [6, 20, 13, 28]
READ_ONLY = {value.name for value in jf.values() if value.access == "r"}


@cache
def of_family(name: str) -> jf.Model:
    return jf.Model(zoo.build(name, fresh=True), tokenizer=words(zoo.VOCAB))


def available(model: jf.Model) -> list[str]:
    """Every site with a row per token that the model serves, the last of the forward pass first."""
    sites: list[str] = []
    for value in reversed(jf.values()):
        if value.name.startswith("attention_cached"):
            continue
        layers = [None] if value.on == "model" else range(model.num_layers)
        served = [layer for layer in layers if model.support(layer)[value.name] is None]
        sites += [value.name if layer is None else f"layers.{layer}.{value.name}" for layer in served]
    return sites


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gptj", "opt", "mixtral", "gemma2", "qwen3_next", "gpt_oss"])
def test_every_value_in_one_list_against_the_order(family: str) -> None:
    """Parallel and sequential blocks, routers, sinks, layers without attention. Edits by 1 change no token."""
    model = of_family(family)
    sites = available(model)
    (plain,) = model.generate([PROMPT], [], max_tokens=3, ignore_eos=True)
    (kept,) = model.generate([PROMPT], [jf.Capture(site) for site in sites], max_tokens=3, ignore_eos=True)
    edits = [jf.Scale(site, 1.0, positions="last") for site in sites if site.rpartition(".")[2] not in READ_ONLY]
    (edited,) = model.generate([PROMPT], edits, max_tokens=3, ignore_eos=True)
    assert kept.token_ids == edited.token_ids == plain.token_ids
    assert set(kept.saved) == set(sites)
    assert all(kept.saved[site].shape[0] == 6 for site in sites if site.startswith("layers"))


def test_keys_that_the_cache_does_not_hold_are_not_edited() -> None:
    model = of_family("deepseek_v3")
    with pytest.raises(jf.InvalidIntervention, match="attention_keys can be read, not edited: the cache"):
        model.generate(PROMPT, [jf.Scale("layers.0.attention_keys", 0)])


def test_a_width_that_no_fact_gives_is_held_against_the_row() -> None:
    """GPT-J's configuration does not say how many neurons there are; a vector of one entry would be broadcast."""
    model = of_family("gptj")
    assert model.intermediate_size == 0
    for width in (1, 255):
        with pytest.raises(jf.InvalidIntervention, match=f"vector has {width} entries, and a row is 256 wide"):
            model.generate(PROMPT, [jf.Steer("layers.0.mlp_activations", torch.ones(width))])
    (result,) = model.generate(PROMPT, [jf.Probe("layers.0.mlp_activations", numbers(2, 256))])
    assert result.saved["layers.0.mlp_activations"].shape == (4, 2)


def test_a_router_is_steered() -> None:
    model = of_family("mixtral")
    experts = model.generate(PROMPT, [jf.Capture("layers.0.router_logits")])[0].saved["layers.0.router_logits"]
    vector = 50.0 * torch.nn.functional.one_hot(torch.tensor(1), experts.shape[-1]).float()
    edits = [jf.Steer("layers.0.router_logits", vector), jf.Capture("layers.0.router_logits")]
    steered = model.generate(PROMPT, edits)[0].saved["layers.0.router_logits"]
    torch.testing.assert_close(steered, experts + vector)
