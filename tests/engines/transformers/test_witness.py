"""A layer whose pattern would be wrong does not serve it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import jackfield as jf
from tests import zoo

NAME = "jackfield_test_attention"


def doubled_scale(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **options: Any) -> Any:
    """An attention function that does not do what its arguments say."""
    return sdpa_attention_forward(module, q, k, v, mask, scaling=2 * scaling, **options)


def as_told(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v, mask, **options)


@pytest.fixture
def registered() -> Iterator[None]:
    AttentionMaskInterface.register(NAME, sdpa_mask)
    yield
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


def model_with(function: Any) -> jf.Model:
    AttentionInterface.register(NAME, function)
    return jf.Model(zoo.build("llama", attn=NAME, fresh=True))


@pytest.mark.usefixtures("registered")
def test_an_op_that_does_more_than_it_is_told_does_not_serve_its_pattern() -> None:
    support = model_with(doubled_scale).support()
    for name in ("attention_scores", "attention_probabilities"):
        assert "more than its arguments tell" in str(support[name])
    assert support["attention_queries"] is None
    assert support["attention_head_outputs"] is None
    assert support["layer_output"] is None


@pytest.mark.usefixtures("registered")
def test_an_op_of_ones_own_that_does_what_it_is_told_serves_everything() -> None:
    support = model_with(as_told).support()
    assert [name for name, reason in support.items() if reason is not None and name.startswith("attention_")] == []


@pytest.mark.usefixtures("registered")
def test_reading_what_is_refused_says_why() -> None:
    model = model_with(doubled_scale)
    with pytest.raises(jf.Unavailable, match="more than its arguments tell"):
        model.run([3, 4, 5], lambda m, t: m.layers[1].attention_probabilities)


def test_loading_leaves_the_model_and_the_random_state_as_they_were() -> None:
    hf = zoo.build("mixtral", fresh=True)
    before = {name: value.clone() for name, value in hf.state_dict().items()}
    ids = zoo.prompt("mixtral", 7)
    with torch.no_grad():
        logits = hf(input_ids=ids).logits
    state = torch.random.get_rng_state()
    jf.Model(hf)
    assert torch.random.get_rng_state().equal(state)
    assert all("forward" not in vars(module) for module in hf.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hf.modules())
    assert all(value.equal(before[name]) for name, value in hf.state_dict().items())
    with torch.no_grad():
        assert hf(input_ids=ids).logits.equal(logits)
