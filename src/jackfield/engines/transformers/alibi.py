"""ALiBi's slopes, as the model's own code makes them."""

import sys

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
    scale = getattr(attention, "inv_norm_factor", 1.0) if _scales_bias(attention) else 1.0
    return (columns[:, 1] - columns[:, 0]) * scale


def _scales_bias(attention: nn.Module) -> bool:
    """Falcon multiplies the sum of products and bias; bloom scales the products alone."""
    return "falcon" in type(attention).__module__
