"""Where each family of transformers 5.19 keeps the values of the contract, written down by hand.

One entry per family, read off its modeling file; what is not mentioned is as in Llama. Paths are below the block,
except `blocks` and `final_norm`, which are below the model. The library finds these places its own way; the point of
this table is that it does not share that way.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

SHARED = "(the attention norm)"
"""As `mlp_norm`: one norm feeds both sublayers, and what enters the MLP is its output."""


@dataclass(frozen=True, slots=True)
class Family:
    """The layout of one family.

    Attributes:
        mixer: stands in `attention`'s place on layers without softmax attention.
        attention_output, mlp_output: the module whose output is added to the stream; None is the sublayer itself.
            Post-norms stand here, and the projections of sublayers that add the residual themselves.
        residual_factor: what the block multiplies that output with.
        rotary: functions of the modeling file that rotate; `rotary_order` says what they are given, in calls that
            take one tensor, or ("pair") both; `rotary_heads_axis` where its heads are; `rotary_last` that the rotated
            part ends a head instead of beginning it.
        queries_at: what is wrapped to see the queries: the attention interface (the default), or a method of an
            attention that does its own maths.
        keys_at: where this step's keys and values are as the attention receives them: entering the cache, or at the
            interface, where the cache holds latents or the calls differ.
        sink: how a sink (`module.sinks`, [H]) joins the softmax: as one more column, each row's maximum taken off
            before; or afterwards, scaling what the head writes. Layers of one family may have sinks or none.
        active_stream: which of several parallel streams is the residual stream (AltUp).
    """

    blocks: str = "model.layers"
    final_norm: str = "model.norm"
    attention: str = "self_attn"
    mixer: str | None = None
    output_projection: str = "o_proj"
    attention_norm: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp: str = "mlp"
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_output: str | None = None
    down_projection: str | None = "mlp.down_proj"
    router: str | None = "mlp.gate"
    parallel: bool = False
    residual_factor: float = 1.0
    rotary: tuple[str, ...] = ("apply_rotary_pos_emb",)
    rotary_order: Literal["pair", "query first", "key first"] = "pair"
    rotary_heads_axis: int = 1
    rotary_last: bool = False
    prerotary_at_projections: bool = False
    queries_at: str = "interface"
    keys_at: Literal["cache", "interface"] = "cache"
    calls: int = 1
    sink: Literal["none", "column", "scale"] = "none"
    active_stream: int | None = None


_LLAMA = Family()
_POST_NORMS = Family(
    attention_output="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_POST_NORMS_ONLY = replace(_POST_NORMS, attention_norm=None, mlp_norm=None)
_PARALLEL = Family(parallel=True, mlp_norm=SHARED)
_GPT2 = Family(
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    attention="attn",
    output_projection="c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    down_projection="mlp.c_proj",
    rotary=(),
)
_GPTJ = replace(
    _GPT2,
    output_projection="out_proj",
    mlp_norm=SHARED,
    down_projection="mlp.fc_out",
    parallel=True,
    rotary=("apply_rotary_pos_emb",),
    rotary_order="key first",
    rotary_heads_axis=2,
    queries_at="_attn",
)
_FALCON = Family(
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    attention="self_attention",
    output_projection="dense",
    down_projection="mlp.dense_4h_to_h",
    queries_at="falcon",
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "gemma": _LLAMA,
    "phi3": _LLAMA,
    "smollm3": _LLAMA,
    "mimo_v2_flash": Family(sink="column"),
    "granite": _LLAMA,
    "granite_swa": Family(sink="scale"),
    "gpt_oss": Family(router="mlp.router", sink="column"),
    "starcoder2": Family(down_projection="mlp.c_proj"),
    "qwen3_next": Family(mixer="linear_attn"),
    "deepseek_v3": Family(
        rotary=("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"), rotary_last=True, keys_at="interface"
    ),
    "diffllama": Family(keys_at="interface", calls=2),
    "llama4_text": Family(
        mlp="feed_forward",
        down_projection="feed_forward.down_proj",
        router="feed_forward.router",
        rotary=("apply_rotary_emb",),
        rotary_heads_axis=2,
        prerotary_at_projections=True,  # its query and key norm, and its temperature, come after the rotation
    ),
    "gemma2": _POST_NORMS,
    "gemma3_text": _POST_NORMS,
    "gemma3n_text": replace(_POST_NORMS, rotary_order="query first", rotary_heads_axis=2, active_stream=0),
    "gemma4_text": replace(_POST_NORMS, rotary_order="query first", rotary_heads_axis=2),
    "vaultgemma": Family(mlp_norm="pre_feedforward_layernorm"),
    "olmo2": _POST_NORMS_ONLY,
    "olmo3": _POST_NORMS_ONLY,
    "exaone4": _POST_NORMS_ONLY,
    "glm4": Family(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm"),
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "stablelm": _LLAMA,
    "phi": replace(_PARALLEL, final_norm="model.final_layernorm", output_projection="dense", down_projection="mlp.fc2"),
    "dbrx": Family(
        blocks="transformer.blocks",
        final_norm="transformer.norm_f",
        attention="norm_attn_norm.attn",
        output_projection="out_proj",
        attention_norm="norm_attn_norm.norm_1",
        mlp="ffn",
        mlp_norm="norm_attn_norm.norm_2",
        down_projection=None,
        router="ffn.router",
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": replace(_GPT2, attention="attn.attention", output_projection="out_proj", queries_at="_attn"),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt_neox": Family(
        blocks="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
        output_projection="dense",
        down_projection="mlp.dense_4h_to_h",
    ),
    "opt": Family(
        blocks="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        output_projection="out_proj",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        mlp_output="fc2",
        down_projection="fc2",
        rotary=(),
    ),
    "bloom": replace(
        _FALCON,
        attention_output="self_attention.dense",  # the attention module adds the residual itself, as does the MLP
        mlp_output="mlp.dense_4h_to_h",
        rotary=(),
        queries_at="_reshape",
    ),
    "mpt": Family(
        blocks="transformer.blocks",
        final_norm="transformer.norm_f",
        attention="attn",
        output_projection="out_proj",
        attention_norm="norm_1",
        mlp="ffn",
        mlp_norm="norm_2",
        mlp_output="ffn.down_proj",  # the MLP module adds the residual itself
        down_projection="ffn.down_proj",
        rotary=(),
        queries_at="Wqkv",
    ),
    "falcon": _FALCON,
}


def family_of(model: PreTrainedModel, name: str) -> Family:
    """The layout of `model`, whose zoo name or `model_type` is `name`, with what its configuration decides."""
    family = FAMILIES[name.partition("/")[0]]
    match name.partition("/")[0]:
        case "granite" | "granite_swa":
            return replace(family, residual_factor=model.config.residual_multiplier)
        case "gpt2" if model.config.reorder_and_upcast_attn:
            return replace(family, queries_at="_upcast_and_reordered_attn")
        case "gpt_neox":
            return replace(family, parallel=model.config.use_parallel_residual)
        case "stablelm" if model.config.use_parallel_residual:
            return replace(family, parallel=True, mlp_norm=SHARED)
        case "falcon":
            return _falcon(model)
        case _:
            return family


def _falcon(model: PreTrainedModel) -> Family:
    """7B: one norm, parallel. 40B: two norms, parallel. RW: in sequence, with ALiBi in the rotation's place."""
    rotary = () if model.config.alibi else _FALCON.rotary
    if model.config.new_decoder_architecture:
        return replace(_FALCON, parallel=True, attention_norm="ln_attn", mlp_norm="ln_mlp", rotary=rotary)
    if model.config.parallel_attn:
        return replace(_FALCON, parallel=True, mlp_norm=SHARED, rotary=rotary)
    return replace(_FALCON, rotary=rotary)


def blocks_of(model: PreTrainedModel, family: Family) -> list[nn.Module]:
    """The decoder blocks, in order."""
    return list(model.get_submodule(family.blocks).children())


def child(block: nn.Module, path: str | None) -> nn.Module | None:
    """The module at `path` below `block`; None where this block has none (a dense block has no router)."""
    if path is None or path == SHARED:
        return None
    try:
        return block.get_submodule(path)
    except AttributeError:
        return None
