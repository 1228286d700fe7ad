"""The prompt's pass for one greedy token, against the one that `generate` makes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MambaConfig, MambaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from jackfield.engines.request import Sampling
from jackfield.engines.transformers import decode as decoding
from jackfield.engines.transformers import prefill
from jackfield.engines.transformers.decode import Row, decode
from tests import zoo

# Each prepares its inputs, its positions, its mask or its cache in another way.
FAMILIES = (
    *("llama", "gpt2", "gptj", "opt", "bloom", "mpt", "falcon/rw", "falcon/7b", "mixtral", "mistral", "gemma2"),
    *("gemma3_text", "gemma3n_text", "gemma4_text", "phi3", "cohere2", "gpt_oss", "deepseek_v3", "llama4_text"),
    *("qwen3_next", "dbrx", "codegen"),
)


@contextmanager
def arguments_of(model: PreTrainedModel) -> Iterator[list[dict[str, Any]]]:
    """What the model is called with, as a call finds it: the cache fills up afterwards."""
    found: list[dict[str, Any]] = []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append({"positional": args, **{name: plain(item) for name, item in kwargs.items()}})

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def plain(item: Any) -> Any:
    if isinstance(item, DynamicCache):
        kinds = [DynamicLayer if type(layer) is prefill.PromptLayer else type(layer) for layer in item.layers]
        return kinds, item.get_seq_length()
    return (item.tolist(), item.dtype, item.shape, item.is_contiguous()) if isinstance(item, Tensor) else item


def called(
    model: PreTrainedModel, prompts: Sequence[Tensor], **sampling: Any
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    rows = [Row(tuple(ids[0].tolist()), Sampling.parse(**sampling)) for ids in prompts]
    with arguments_of(model) as found:
        tokens = [completion.token_ids for completion in decode(model, None, rows)]
    return found, tokens


@pytest.mark.parametrize("lengths", [(7,), (7, 7), (9, 4)], ids=["alone", "same length", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_called_as_generate_calls_it(name: str, lengths: Sequence[int]) -> None:
    """Kills: a mask of ones that is passed on, positions that count padding, logits of every row."""
    model = zoo.build(name)
    prompts = [zoo.prompt(name, length) for length in lengths]
    direct, tokens = called(model, prompts)
    through_generate, expected = called(model, prompts, logprobs=0)  # which `generate` alone keeps
    assert prefill.prefills(model)
    assert direct == through_generate
    assert tokens == expected


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_holds_what_generates_holds(name: str, length: int) -> None:
    """Kills: a prompt's keys and values, or what is computed of them, that are not to the bit what they were."""
    model, prompts = zoo.build(name), [zoo.prompt(name, length)]
    with results_of(model) as found:
        called(model, prompts)
        called(model, prompts, logprobs=0)
    (logits, held), (expected, wanted) = found
    assert logits.equal(expected)
    for one, other in zip(held, wanted, strict=True):
        assert one.equal(other)
        assert one.stride() == other.stride()


@contextmanager
def results_of(model: PreTrainedModel) -> Iterator[list[tuple[Tensor, list[Tensor]]]]:
    """The last row's logits, and all keys and values that are kept."""
    found: list[tuple[Tensor, list[Tensor]]] = []

    def keep(_: Any, args: tuple[Any, ...], output: Any) -> None:
        layers = [layer for layer in output.past_key_values.layers if getattr(layer, "keys", None) is not None]
        found.append((output.logits[:, -1], [tensor for layer in layers for tensor in (layer.keys, layer.values)]))

    handle = model.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def test_generate_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("generate was called")

    monkeypatch.setattr(decoding, "_generate", refuse)
    assert len(called(model, [zoo.prompt("llama", 5)])[1][0]) == 1
    with pytest.raises(AssertionError, match="generate was called"):
        called(model, [zoo.prompt("llama", 5)], max_tokens=2)


def test_a_cache_is_that_of_the_configuration_as_it_is() -> None:
    """Kills: a cache of before the configuration was changed, and one that an earlier prompt has filled."""
    model, caches = zoo.build("gemma2", fresh=True), prefill.PromptCaches()
    for window in (8, 5):
        model.config.sliding_window = window
        for _ in range(2):
            layers = caches.empty(model).layers
            kinds = [(type(layer), getattr(layer, "sliding_window", None)) for layer in layers]
            assert kinds == [(DynamicSlidingWindowLayer, window), (prefill.PromptLayer, None)] * 2
            for layer in layers:
                assert not layer.is_initialized
                layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    model.config.layer_types[0] = "full_attention"
    assert type(caches.empty(model).layers[0]) is prefill.PromptLayer
    model.config.of_the_users_own = torch.ones(2)
    assert [caches.empty(model).get_seq_length() for _ in range(2)] == [0, 0]


class OwnGeneration(type(zoo.build("llama"))):
    """A class that has a part of generation to itself."""

    def _prepare_position_ids_for_generation(self, *args: Any) -> Tensor:
        return super()._prepare_position_ids_for_generation(*args) + 1


def test_a_class_with_generation_of_its_own_goes_through_generate() -> None:
    model = OwnGeneration(zoo.build("llama").config).eval()
    assert not prefill.prefills(model)
    found, _ = called(model, [zoo.prompt("llama", 5)])
    assert found[0]["position_ids"][0] == [[1, 2, 3, 4, 5]]


def test_models_with_another_cache_or_a_replaced_forward_go_through_generate() -> None:
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert not prefill.prefills(MambaForCausalLM(config))
    model = zoo.build("llama", fresh=True)
    model.forward = model.forward
    assert not prefill.prefills(model)


def test_no_gradients_are_kept() -> None:
    model = zoo.build("llama")
    with torch.enable_grad(), arguments_of(model):
        assert called(model, [zoo.prompt("llama", 5)])[1] == called(model, [zoo.prompt("llama", 5)], logprobs=0)[1]
        assert torch.is_grad_enabled()
