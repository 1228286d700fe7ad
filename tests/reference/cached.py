"""An edit of what a layer's cache holds, by raw hook: at each step, all keys or all values of the request so far.

edited = cached_edit(model, ids, "attention_cached_keys", 1, lambda x: 0 * x, steps=4)
edited.token_ids, edited.logits          # 4 tokens, [4, vocab]
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.reference.edits import Edited
from tests.reference.places import padded_to

CACHED: tuple[str, ...] = ("attention_cached_keys", "attention_cached_values")


class EditedCache(DynamicCache):
    """A cache that changes what it has of one layer, after this step's rows came in and before they are attended to.

    `change` gets [1, kv_head, key, width] with NaN where a window has dropped positions. With `forgets` the attention
    of this step sees the change and the cache does not keep it.
    """

    def __init__(
        self, model: PreTrainedModel, value: str, layer: int, change: Callable[[Tensor], Tensor], *, forgets: bool
    ) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self._of_keys, self._layer, self._change = value == "attention_cached_keys", layer, change
        self._forgets = forgets
        self.positions = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx != self._layer:
            return keys, values
        held = self.layers[layer_idx]
        if self._of_keys:
            return self._changed(keys, held.keys), values
        return keys, self._changed(values, held.values)

    def _changed(self, attended: Tensor, held: Tensor) -> Tensor:
        whole = self._change(padded_to(attended, self.positions, torch.nan, dim=2).clone())
        changed = whole[:, :, -attended.shape[2] :].clone()
        if not self._forgets:
            held.copy_(changed[:, :, -held.shape[2] :])
        return changed


@torch.no_grad()
def cached_edit(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    value: str,
    layer: int,
    change: Callable[[Tensor], Tensor],
    steps: int,
    *,
    forgets: bool = False,
) -> Edited:
    """The tokens and logits of a greedy run in which `change` is applied to `value` of `layer` at every step."""
    cache = EditedCache(model, value, layer, change, forgets=forgets)
    accepted = inspect.signature(model.forward).parameters
    token_ids, logits, ids = list[int](), list[Tensor](), prompt_ids
    for _ in range(steps):
        before, cache.positions = cache.positions, cache.positions + ids.shape[1]
        positions = {"position_ids": torch.arange(before, cache.positions)[None]}
        row = model(
            input_ids=ids,
            attention_mask=torch.ones(1, cache.positions, dtype=torch.long),
            past_key_values=cache,
            use_cache=True,
            **{name: item for name, item in positions.items() if name in accepted},
        ).logits[:, -1]
        logits.append(row[0])
        token_ids.append(int(row.argmax()))
        ids = torch.tensor([token_ids[-1:]])
    return Edited(token_ids, torch.stack(logits))
