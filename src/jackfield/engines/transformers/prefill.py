"""A prompt's own forward pass, called as `generate` calls it, where one greedy token is all that is wanted of it.

`generate` prepares a configuration, processors and criteria each time, some milliseconds of Python, and of all that one
greedy token needs only the call of the model. Its arguments are the same, object for object, on every architecture
whose class leaves generation as transformers has it (read in transformers 5.19, `generate`, `_sample` and `_prefill`);
a test holds them against each other. Every other model goes through `generate`.
"""

import copy
import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

ASKED = ("prepare_inputs_for_generation",)  # what is called here too, where a class has its own


class PromptLayer(DynamicLayer):
    """Keys and values of one layer, in a cache that a prompt alone goes into.

    A DynamicLayer begins with two empty tensors and joins what comes to them: on a thin model a tenth of the forward
    pass. What it then holds is the same, a copy laid out as the join leaves it.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the layer's queries attend to."""
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = _joined(key_states), _joined(value_states)
        return self.keys, self.values


class PromptCaches:
    """Empty caches of one model. transformers makes each out of the configuration, layer by layer: those after the
    first are copies, as long as the configuration is what it was.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] | None = None
        self._first = DynamicCache()

    def empty(self, model: PreTrainedModel) -> DynamicCache:
        """One that a prompt alone goes into."""
        config = model.config.get_text_config(decoder=True)
        if not self._are_known(vars(config)):
            self._first = DynamicCache(config=config)
            self._settings = copy.deepcopy(vars(config))
        cache = copy.copy(self._first)
        cache.layers = [
            PromptLayer() if type(layer) is DynamicLayer else copy.deepcopy(layer) for layer in self._first.layers
        ]
        return cache

    def _are_known(self, settings: dict[str, Any]) -> bool:
        try:
            return settings == self._settings
        except (RuntimeError, ValueError):  # of a tensor or an array among them, which equals nothing in one word
            return False


def _joined(states: Tensor) -> Tensor:
    return states.clone(memory_format=torch.contiguous_format)


def prefills(model: PreTrainedModel) -> bool:
    """Whether the prompt's pass of this model can be called here."""
    return "forward" not in vars(model) and not model.config.is_encoder_decoder and _parameters(type(model)) is not None


def greedy_tokens(
    model: PreTrainedModel, input_ids: Int[Tensor, "row token"], pads: Sequence[int], caches: PromptCaches
) -> list[int]:
    """The likeliest next token of each row, of which the first `pads` columns are padding; without gradients."""
    with torch.no_grad():
        logits = cast("Any", model)(**_arguments(model, input_ids, pads, caches), return_dict=True).logits
        return cast("list[int]", logits[:, -1].float().argmax(-1).tolist())


def _arguments(model: PreTrainedModel, input_ids: Tensor, pads: Sequence[int], caches: PromptCaches) -> dict[str, Any]:
    parameters = _parameters(type(model))
    assert parameters is not None
    rows, width = input_ids.shape
    given: dict[str, Any] = {"past_key_values": caches.empty(model)}
    if any(pads):
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        given["attention_mask"] = torch.tensor(mask, device=input_ids.device)
    if "position_ids" in parameters:
        given["position_ids"] = _positions(rows, width, pads).to(input_ids.device)
    if "logits_to_keep" in parameters:
        given["logits_to_keep"] = 1
    if not _own(type(model), *ASKED):
        return {"input_ids": input_ids, **given, "use_cache": True}
    return cast("Any", model).prepare_inputs_for_generation(
        input_ids, next_sequence_length=width, is_first_iteration=True, use_cache=True, **given
    )


def _positions(rows: int, width: int, pads: Sequence[int]) -> Tensor:
    """Counted from each row's first token; in padding 0."""
    if any(pads):
        return torch.tensor([[0] * pad + list(range(width - pad)) for pad in pads])
    return torch.tensor(
        [list(range(width))] * rows
    )  # as the ids are made: another operation would have to be warmed up


@lru_cache(maxsize=256)
def _parameters(kind: type[PreTrainedModel]) -> frozenset[str] | None:
    """What its forward takes; None where something of its generation is its own, or it has a cache of its own."""
    if any(name not in ASKED and _own(kind, name) for name in vars(GenerationMixin) if not name.startswith("__")):
        return None
    parameters = frozenset(inspect.signature(kind.forward).parameters)
    known_cache = cast("Any", kind)._supports_default_dynamic_cache() and "mamba" not in kind.__name__.lower()
    takes_ids = kind.main_input_name == "input_ids" and "attention_mask" in parameters
    plain = known_cache and takes_ids and "mm_encoder_outputs" not in parameters and not kind.is_remote_code()
    return parameters if plain else None


@lru_cache(maxsize=16384)
def _own(kind: type[PreTrainedModel], name: str) -> bool:
    """Whether a class has another attribute than GenerationMixin. Through __dict__: access binds class methods."""
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return found is not vars(GenerationMixin)[name]
