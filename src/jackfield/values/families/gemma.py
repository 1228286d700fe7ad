"""Gemma 3n, whose stream is one of several that AltUp mixes. (transformers 5.19, modeling_gemma3n.py)"""

from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Formula
from jackfield.values.families.family import Family

# `altup_active_idx` is 0 in every released configuration.
_ACTIVE = 0

GEMMA3N = Family(
    model_types=("gemma3n_text", "gemma3n"),
    mlp="mlp",
    values={
        "layer_input": Formula(Site("", Port.INPUT), stream=_ACTIVE),
        "attention_output": Formula(Site("post_attention_layernorm", Port.OUTPUT)),
        "layer_mid": Formula(Site("pre_feedforward_layernorm", Port.INPUT)),
        "mlp_output": Formula(Site("post_feedforward_layernorm", Port.OUTPUT)),
        "layer_output": Formula(Site("", Port.OUTPUT), stream=_ACTIVE),
    },
    broken={
        "residual_stream": "AltUp: a block predicts each of several streams from all, adds its sublayers to the active "
        "one, averages in a low-rank layer (LAuReL), and corrects all streams by the result"
    },
)

GEMMA4 = Family(
    model_types=("gemma4_text", "gemma4"),
    broken={
        "residual_stream": "after the MLP a block adds a projection of this layer's own embeddings of the tokens, "
        "and multiplies its stream by a number of its own"
    },
)
