"""Tiny random models, one configuration per quirk of attention, and `heat`, which makes their mistakes visible.

Not for behaviour of trained models: the sample model is for that. Every entry builds in well under a second. With the
default initialisation attention is nearly uniform and every norm is the identity, so a wrong scale, window or head
order changes almost nothing; `heat` spreads the weights until each of them does.

    model = zoo.build("gemma2")                 # eager, float32, heated, eval; shared: do not modify it
    model = zoo.build("gemma2", fresh=True)     # your own copy
    ids = zoo.prompt("gemma2", 12)              # [1, 12]
"""

import warnings
from functools import cache
from typing import (
    Any,  # configuration values are whatever each family's configuration class takes
)

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 128
SPECIAL_IDS = 3
"""Ids 0, 1 and 2 pad, begin and end a sequence; prompts avoid them."""

_MHA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GQA: dict[str, Any] = dict(_MHA, num_key_value_heads=2)
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_SSSF = ["sliding_attention"] * 3 + ["full_attention"]
_SF = ["sliding_attention", "full_attention"]
_FALCON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_GRANITE: dict[str, Any] = dict(
    _GQA,
    attention_multiplier=0.9,
    embedding_multiplier=6.0,
    residual_multiplier=0.22,
    logits_scaling=8.0,
)
_GEMMA2: dict[str, Any] = dict(_GQA, head_dim=32, query_pre_attn_scalar=24)
_DEEPSEEK: dict[str, Any] = dict(
    _MHA,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    n_shared_experts=1,
)
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_SHARED_CACHE: dict[str, Any] = dict(
    _MHA,
    num_hidden_layers=6,
    num_key_value_heads=2,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=8,
    head_dim=16,
    sliding_window=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)
del _SHARED_CACHE["tie_word_embeddings"]

ZOO: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2/inv": dict(_GPT2, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=False),
    "gpt2/upcast": dict(_GPT2, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "gpt2/noscale": dict(_GPT2, n_layer=2, scale_attn_weights=False),
    "gpt_neox": dict(_MHA, rotary_pct=0.25, use_parallel_residual=True),
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 8,
        "max_position_embeddings": 256,
        "intermediate_size": 96,
    },
    "gptj": dict(_GPT2, rotary_dim=8),
    "gpt_bigcode": dict(_GPT2, multi_query=True),
    "gpt_bigcode/noscale": dict(_GPT2, multi_query=True, scale_attn_weights=False),
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 48,
        "do_layer_norm_before": True,
    },
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4},
    "bloom/6h": {"hidden_size": 96, "n_layer": 3, "n_head": 6},
    "mpt": {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 256,
        "expansion_ratio": 2,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
    },
    "falcon/7b": dict(
        _FALCON,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        alibi=False,
    ),
    "falcon/40b": dict(_FALCON, num_kv_heads=2, new_decoder_architecture=True, alibi=False),
    "falcon/rw": dict(
        _FALCON,
        multi_query=False,
        parallel_attn=False,
        new_decoder_architecture=False,
        alibi=True,
        bias=True,
    ),
    "llama": _GQA,
    "llama/hd": dict(_GQA, head_dim=24),
    "llama/mqa": dict(_GQA, num_key_value_heads=1),
    "llama/8h": dict(_GQA, num_attention_heads=8, head_dim=16),
    "mistral": dict(_GQA, sliding_window=8),
    "mixtral": dict(_GQA, sliding_window=None, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": dict(_GQA, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3": dict(_GQA, head_dim=32),
    "qwen3_moe": dict(
        _GQA,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
        mlp_only_layers=[],
    ),
    "gemma": dict(_GQA, head_dim=32),
    "gemma2": dict(
        _GEMMA2,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": dict(
        _GEMMA2,
        sliding_window=8,
        layer_types=[
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
    ),
    "cohere": dict(_GQA, use_qk_norm=True, logit_scale=0.25),
    "cohere2": dict(_GQA, sliding_window=8, logit_scale=0.25, layer_types=_SSSF),
    "phi": dict(_MHA, partial_rotary_factor=0.5, qk_layernorm=True),
    "phi3": dict(_GQA, sliding_window=8, partial_rotary_factor=0.5),
    "olmo2": _GQA,
    "olmo3": dict(_GQA, sliding_window=8, layer_types=_SSSF),
    "granite": _GRANITE,
    "gpt_oss": dict(
        _GQA,
        head_dim=32,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=_SF * 2,
    ),
    "deepseek_v3": dict(_DEEPSEEK, q_lora_rank=24, first_k_dense_replace=1),
    "deepseek_v3/yarn": dict(_DEEPSEEK, q_lora_rank=None, first_k_dense_replace=4, rope_parameters=_YARN),
    "starcoder2": dict(_GQA, sliding_window=8, use_bias=True),
    "stablelm": dict(_GQA, partial_rotary_factor=0.25, use_parallel_residual=True, qk_layernorm=True),
    "glm4": dict(_GQA, head_dim=16, partial_rotary_factor=0.5),
    "exaone4": dict(_GQA, sliding_window=8, sliding_window_pattern=4, layer_types=_SSSF),
    "smollm3": dict(_GQA, no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4),
    "llama4_text": dict(
        _GQA,
        intermediate_size=32,
        intermediate_size_mlp=96,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=8,
        no_rope_layers=[1, 1, 1, 0],
        interleave_moe_layer_step=2,
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=0.5,
        use_qk_norm=True,
    ),
    "qwen3_next": dict(
        _GQA,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        partial_rotary_factor=0.25,
    ),
    "gemma3n_text": dict(
        _SHARED_CACHE,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    "granite_swa": dict(_GRANITE, sliding_window=8, layer_types=_SF * 2),
    "mimo_v2_flash": dict(
        _GQA,
        head_dim=24,
        v_head_dim=16,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"] * 2,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
    "diffllama": _GQA,
    "vaultgemma/allfull": dict(
        _GEMMA2,
        sliding_window=4,
        layer_types=["full_attention"] * 4,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "vaultgemma": dict(
        _GEMMA2,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "codegen": dict(_GPT2, n_ctx=256, rotary_dim=8),
    "gemma4_text": dict(_SHARED_CACHE, global_head_dim=32),
}
"""`model_type` or `model_type/variant`, and what its configuration class is called with."""

NAMES: tuple[str, ...] = tuple(ZOO)

_ATTENTION_INPUTS = (
    "q_proj", "k_proj", "qkv", "query_key_value", "c_attn", "wqkv", "q_b_proj", "kv_b_proj", "attn.in_proj",
)  # fmt: skip
_OTHER_WEIGHTS = (
    "v_proj",
    "o_proj",
    "out_proj",
    "dense",
    "c_proj",
    "down_proj",
    "up_proj",
    "embed",
    "wte",
)


def family(name: str) -> str:
    """The `model_type` of a zoo name."""
    return name.partition("/")[0]


def config(name: str, **over: Any) -> PretrainedConfig:
    """A new configuration; `over` replaces single settings."""
    # Some families' own special ids are outside so small a vocabulary.
    small = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(family(name), **(small | ZOO[name] | over))


def build(
    name: str,
    attn: str = "eager",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    fresh: bool = False,
    hot: bool = True,
    **over: Any,
) -> PreTrainedModel:
    """A heated model in eval mode on the CPU. Without `over` it is shared by all callers, unless `fresh`."""
    if over or fresh:
        return _build(name, attn, dtype, seed, hot, over)
    return _shared(name, attn, dtype, seed, hot)


@cache
def _shared(name: str, attn: str, dtype: torch.dtype, seed: int, hot: bool) -> PreTrainedModel:
    return _build(name, attn, dtype, seed, hot, {})


def _build(name: str, attn: str, dtype: torch.dtype, seed: int, hot: bool, over: dict[str, Any]) -> PreTrainedModel:
    """Weights are drawn and heated in float32, so that every dtype is a rounding of the same model."""
    model = _drawn(config(name, **over), attn, torch.float32, seed)
    model = heat(model) if hot else model
    if dtype == torch.float32:
        return model
    rounded = _drawn(config(name, **over), attn, dtype, seed)  # not `.to(dtype)`, which rounds rotary frequencies too
    rounded.load_state_dict(model.state_dict())
    return rounded


def _drawn(settings: PretrainedConfig, attn: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # Some modeling files use what torch deprecates, at import: not ours to fix, and warnings are errors in tests.
        warnings.simplefilter("ignore", DeprecationWarning)
        model = AutoModelForCausalLM.from_config(settings, attn_implementation=attn, dtype=dtype)
    return model.eval()


@torch.no_grad()
def heat(model: PreTrainedModel, query_key_gain: float = 8.0, seed: int = 1) -> PreTrainedModel:
    """Make attention peaked, norms and biases random, sinks large and sublayers loud, in place; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        _heat_parameter(name.lower(), parameter, query_key_gain, generator)
    return model


def _heat_parameter(name: str, parameter: Tensor, query_key_gain: float, generator: torch.Generator) -> None:
    def noise() -> Tensor:
        return torch.randn(parameter.shape, generator=generator)

    if (parameter.ndim == 1 and "norm" in name) or (".ln_" in name and name.endswith("weight")):
        parameter.add_(0.3 * noise())
    elif parameter.ndim == 2 and any(part in name for part in _ATTENTION_INPUTS):
        parameter.mul_(query_key_gain)
    elif "sinks" in name:
        parameter.copy_(noise())
    elif parameter.ndim == 2 and any(part in name for part in (*_OTHER_WEIGHTS, "word_embeddings")):
        parameter.mul_(3)
    if name.endswith("bias"):
        parameter.add_(0.1 * noise())


def prompt(name: str, length: int, seed: int = 0) -> Int[Tensor, "1 token"]:
    """Token ids [1, length], int64, the same for every name of one vocabulary, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    vocab = config(name).get_text_config().vocab_size
    return torch.randint(SPECIAL_IDS, vocab, (1, length), generator=generator)
