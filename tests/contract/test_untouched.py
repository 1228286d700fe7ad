"""After any trace the model is as it was: its answers to the bit, its forwards, hooks, state, configuration, tables."""

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import jackfield as jf


def look(raw: Any, prompt: list[int]) -> dict[str, Any]:
    """What can be seen of a model from outside."""
    modules = dict(raw.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "forwards": {name for name, module in modules.items() if "forward" in module.__dict__},
        "attributes": {name: sorted(module.__dict__) for name, module in modules.items()},
        "hooks": sum(len(getattr(module, kind)) for module in modules.values() for kind in hooks),
        "state": sorted(raw.state_dict()),
        "classes": {name: type(module) for name, module in modules.items()},
        "table": (dict(ALL_ATTENTION_FUNCTIONS), sorted(ALL_ATTENTION_FUNCTIONS.__dict__)),
        "training": raw.training,
        "settings": settings(raw),
        "ids": [row.argmax().item() for row in generated(raw, prompt, 3)],
    }


def settings(raw: Any) -> Any:
    """What a model of transformers has beside its modules."""
    if not isinstance(raw, PreTrainedModel):
        return None
    return raw.config._attn_implementation, raw.generation_config.to_dict()


def plain_logits(raw: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        output = raw(torch.tensor([prompt]))
    return output if isinstance(output, torch.Tensor) else output.logits


@torch.no_grad()
def generated(raw: Any, prompt: list[int], steps: int) -> list[torch.Tensor]:
    """The logits [1, vocab] of each greedy step, without jackfield's engines."""
    ids = torch.tensor([prompt])
    if isinstance(raw, PreTrainedModel):
        options = {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
        return list(raw.generate(ids, max_new_tokens=steps, do_sample=False, **options).logits)
    rows: list[torch.Tensor] = []
    for step in range(steps):
        rows.append(raw(ids, step and len(prompt) + step - 1, last_row=True)[:, -1])
        ids = rows[-1].argmax(-1, keepdim=True)
    return rows


def everything(m: jf.Model, t: Any) -> None:
    for _ in t.iter[:]:
        layer = m.layers[1]
        layer.attention_norm_output *= 2
        layer.attention_keys *= 2
        layer.attention_probabilities *= 0.5
        layer.attention_premix.zero_()
        layer.mlp_activations.zero_()
        layer.layer_output += 1
        m.logits += 1


def fails(m: jf.Model, t: Any) -> None:
    m.layers[0].attention_scores.zero_()
    raise ValueError


def is_interrupted(m: jf.Model, t: Any) -> None:
    m.layers[0].attention_scores.zero_()
    raise KeyboardInterrupt


def raw_places(m: jf.Model, t: Any) -> None:
    m.layers[0].attention.input.zero_()
    m.layers[0].mlp.output.zero_()


def test_the_model_is_as_it_was(model: jf.Model, raw: nn.Module, prompt: list[int], prompts: list[list[int]]) -> None:
    before, logits = look(raw, prompt), plain_logits(raw, prompt)
    for block in (everything, fails, is_interrupted, raw_places):
        with contextlib.suppress(ValueError, KeyboardInterrupt, ExceptionGroup):
            model.run(prompts, block, max_tokens=2, ignore_eos=True)
        repr(model.layers[0].attention)
        dir(model)
        assert look(raw, prompt) == before, block.__name__
        assert plain_logits(raw, prompt).equal(logits), block.__name__


def stays_in_inference_mode(m: jf.Model, t: Any) -> None:
    mode = torch.inference_mode()
    mode.__enter__()
    _ = m.layers[0].layer_output
    raise ValueError(mode)


def test_inference_mode_that_a_block_leaves_open_is_over_with_it(model: jf.Model, prompt: list[int]) -> None:
    with pytest.raises((ValueError, jf.TracingError), match="inference_mode") as caught:  # vLLM cannot send the mode
        model.run(prompt, stays_in_inference_mode)
    try:
        gc.collect()
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)
    finally:
        if isinstance(caught.value, ValueError):  # else torch does so, when nobody has the error any more
            caught.value.args[0].__exit__(None, None, None)
        torch.set_grad_enabled(True)


def test_a_trace_that_reads_all_says_what_generate_says(model: jf.Model, raw: Any, prompt: list[int]) -> None:
    found = generated(raw, prompt, 4)

    def block(m: jf.Model, t: Any) -> Any:
        rows = []
        for _ in t.iter[:]:
            for layer in m.layers:
                _ = layer.attention_queries, layer.attention_scores, layer.attention_probabilities, layer.layer_output
            rows.append(m.logits[0])
        return rows

    result = model.run(prompt, block, max_tokens=4, ignore_eos=True)
    assert result.token_ids == [row.argmax().item() for row in found]
    for one, other in zip(result.returned, found, strict=True):
        assert one.equal(other)
