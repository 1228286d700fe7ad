"""Soft caps that the kernel of a model leaves out.

transformers' sdpa function takes the soft cap that Gemma 2's attention passes it, and computes without: another model
than the one that was trained, and than the one that eager attention, flash attention or vLLM run.
"""

import warnings
from collections.abc import Iterator
from typing import Final

from transformers import PreTrainedModel

from jackfield.values.anatomy import Anatomy, AttentionAnatomy

DROPPED_BY_SDPA: Final = ("softcap", "s_aux")  # what the function takes and leaves out of its maths


def leaves_out_caps(model: PreTrainedModel) -> bool:
    """Whether the attention that `model` runs now computes without the soft cap it is given."""
    return model.config.get_text_config()._attn_implementation == "sdpa"  # pyright: ignore[reportPrivateUsage]


def keep_caps(model: PreTrainedModel, anatomy: Anatomy, *, chosen: bool) -> None:
    """Sees to it that soft caps count: eager attention, unless the user has chosen another; then a warning."""
    cap = next(_caps(anatomy), None)
    if cap is None or not leaves_out_caps(model):
        return
    if not chosen:
        model.set_attn_implementation("eager")
        return
    warnings.warn(
        f"{type(model).__name__} runs transformers' sdpa attention, which leaves out the soft cap ({cap:g}) that it "
        "is given: outputs and scores are uncapped. `set_attn_implementation('eager')` of the model keeps it.",
        stacklevel=2,
    )


def _caps(anatomy: Anatomy) -> Iterator[float]:
    for layer in anatomy.layers:
        if isinstance(layer.attention, AttentionAnatomy) and layer.attention.softcap is not None:
            yield layer.attention.softcap
