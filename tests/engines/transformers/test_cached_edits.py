"""Edits of cached keys and values on a decode step, against the same edit of transformers' own cache by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import jackfield as jf
from tests import zoo

FAMILIES = (
    *("llama", "gpt2", "gptj", "opt", "bloom", "falcon/7b", "mixtral", "mistral", "gemma2", "gemma3_text", "phi3"),
    *("qwen2", "qwen3", "stablelm", "cohere2", "granite", "gpt_oss", "olmo2"),
)
LENGTH, STEPS, EDITED_STEP, LAYER = 9, 5, 2, 1
NEWEST = LENGTH + EDITED_STEP - 2  # the last position that the cache holds before that step: in every window


def by_hand(model: PreTrainedModel, ids: Tensor, which: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The logits of every step, [step, vocab]; the cache is changed before the pass of one."""
    cache, found, given = DynamicCache(config=model.config), list[Tensor](), ids
    for step in range(STEPS):
        if step == EDITED_STEP:
            held = getattr(cache.layers[LAYER], which)
            held[:, 0, -1] = change(held[:, 0, -1])
        found.append(model(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1])
        given = found[-1].argmax().view(1, 1)
    return torch.stack(found)


def edited(model: jf.Model, ids: Tensor, which: str, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Any]:
    def block(m: jf.Model, t: Any) -> Tensor:
        logits = list[Tensor]()
        for step in t.iter[:]:
            if step == EDITED_STEP:
                held = getattr(m.layers[LAYER], f"attention_cached_{which}")
                held[:, 0, NEWEST] = change(held[:, 0, NEWEST])
            logits.append(m.logits[0, -1])
        return torch.stack(logits)

    result = model.run(ids[0].tolist(), block, max_tokens=STEPS, ignore_eos=True)
    return result.returned, result.token_ids


@torch.no_grad()
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cached_row_is_edited_as_by_hand_and_stays_so(name: str, which: str) -> None:
    """Kills: an edit that the cache does not keep, of another column, head or layer, or of the keys before rotation."""
    model, ids = zoo.build(name), zoo.prompt(name, LENGTH)
    ours = jf.Model(model)
    assert ours.support(LAYER)[f"attention_cached_{which}"] is None
    plain, expected = (by_hand(model, ids, which, change) for change in (lambda row: row, lambda row: -3 * row))
    logits, tokens = edited(ours, ids, which, lambda row: -3 * row)
    assert tokens == expected.argmax(-1).tolist()
    size = float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * size)
    for step in range(EDITED_STEP, STEPS):  # so that something is shown
        assert float((logits[step] - plain[step]).abs().max()) > 1e-3 * size
