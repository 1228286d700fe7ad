"""ALiBi's slopes, as the model's own code makes them."""

import sys
from typing import Any, cast  # Any: a module's attributes depend on its family

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def alibi_slopes(model: PreTrainedModel, attention: nn.Module, num_heads: int) -> Tensor | None:
    """The slope of each head [head], float32: what its score falls by per token of distance. None without ALiBi.

    The bias is asked of the function that the model's own file makes it with, for two keys, and the slope is their
    difference: families order the slopes of head counts that are no power of two differently.
    """
    names = vars(sys.modules[type(attention).__module__])
    config = model.config.get_text_config()
    if "build_mpt_alibi_tensor" in names:
        settings = config.attn_config
        if not settings.alibi:
            return None
        bias = names["build_mpt_alibi_tensor"](num_heads, 2, settings.alibi_bias_max)
    elif "build_alibi_tensor" in names and getattr(config, "alibi", True):
        bias = names["build_alibi_tensor"](torch.ones(1, 2, dtype=torch.long), num_heads, torch.float32)
    else:
        return None
    columns = bias.reshape(num_heads, 2).float()
    return (columns[:, 1] - columns[:, 0]) * _bias_factor(attention, getattr(config, "_attn_implementation", None))


def _bias_factor(attention: nn.Module, implementation: str | None) -> float:
    """Falcon multiplies the sum of products and bias; bloom scales the products alone.

    Where it does its own softmax, Falcon (transformers 5.19) adds the bias once more, out of the mask.
    """
    if "falcon" not in type(attention).__module__:
        return 1.0
    return float(cast("Any", attention).inv_norm_factor) * (1 if implementation == "sdpa" else 2)
