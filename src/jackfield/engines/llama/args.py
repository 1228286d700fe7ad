"""What a Llama is: its sizes, from a configuration of transformers or from Meta's `params.json`.

A setting that nothing here implements is refused by its name: a model that ran without it would be another model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict  # Any: configuration values are whatever JSON holds

from transformers import PretrainedConfig

from jackfield.errors import UnsupportedModel


class CacheSize(TypedDict, total=False):
    """How many requests, and tokens of each, a cache has room for."""

    max_batch_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Slower rotary frequencies, for contexts longer than the one first trained on; `rotary` applies them."""

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The sizes of a model and of its cache, by Meta's names.

    `ffn_dim`, the number of neurons, replaces the rule of `multiple_of` and `ffn_dim_multiplier`. `tied`: the output
    head is the embedding. UnsupportedModel for heads that cannot be shared, or cannot be turned.
    """

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    vocab_size: int = 32000
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_batch_size: int = 8
    max_seq_len: int = 2048
    head_dim: int | None = None
    ffn_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise UnsupportedModel(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}.")
        if self.d_head % 2:
            raise UnsupportedModel(f"head_dim={self.d_head} is odd: the rotary embedding turns pairs of channels.")

    @property
    def d_head(self) -> int:
        """`head_dim`, or an equal part of `dim`."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def d_mlp(self) -> int:
        """`ffn_dim`, or two thirds of four times `dim`, times the multiplier, rounded up to a multiple."""
        neurons = int(int(2 * 4 * self.dim / 3) * (self.ffn_dim_multiplier or 1))
        return self.ffn_dim or -(-neurons // self.multiple_of) * self.multiple_of


_CONFIG = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "norm_eps": "rms_norm_eps",
    "head_dim": "head_dim", "ffn_dim": "intermediate_size", "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias", "tied": "tie_word_embeddings",
}  # fmt: skip
_NO_MATTER = {
    "max_position_embeddings", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
    "unk_token_id", "attention_dropout", "pretraining_tp", "is_llama_config", "transformers.js_config",
}  # fmt: skip
_ROPE = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_PARAMS = {"dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta"}


def args_from_config(config: PretrainedConfig, cache: CacheSize) -> ModelArgs:
    """The sizes in a configuration of transformers.

    UnsupportedModel, with the attribute's name, where one is set that is not implemented (`sliding_window`, ...).
    """
    found: dict[str, Any] = config.to_dict()
    rope: dict[str, Any] = found.pop("rope_parameters", {})
    _expect("model_type", found.pop("model_type"), "llama", "mistral")
    _expect("hidden_act", found.pop("hidden_act"), "silu", "swish")
    _expect("rope_type", rope.get("rope_type"), "default", "linear", "llama3")
    _refuse_others(found, _NO_MATTER.union(_CONFIG.values(), PretrainedConfig().to_dict()))
    _refuse_others(rope, _ROPE | {"rope_type", "type", "rope_theta"})
    scaling = {name: rope[name] for name in rope if name in _ROPE | {"rope_type"}}
    return ModelArgs(
        **{ours: found[theirs] for ours, theirs in _CONFIG.items() if theirs in found},
        rope_theta=rope["rope_theta"],
        rope_scaling=None if rope["rope_type"] == "default" else RopeScaling(**scaling),
        **cache,
    )


def args_from_params(params: Mapping[str, Any], cache: CacheSize, vocab_size: int) -> ModelArgs:
    """The sizes in Meta's `params.json`; `vocab_size` is the weights' own, since the file may say -1.

    `use_scaled_rope` alone means a factor of 8, as in Meta's code (llama-models, models/llama3/model.py). Llama 3.2
    was trained with 32, which its file does not say: add `"rope_scaling_factor": 32` there.
    """
    _refuse_others(params, _PARAMS | {"vocab_size", "use_scaled_rope", "rope_scaling_factor"})
    scaling = RopeScaling("llama3", params.get("rope_scaling_factor", 8.0)) if params.get("use_scaled_rope") else None
    sizes = {name: params[name] for name in _PARAMS if name in params}
    return ModelArgs(**sizes, vocab_size=vocab_size, rope_scaling=scaling, **cache)


def _expect(name: str, found: object, *allowed: str) -> None:
    if found not in allowed:
        raise UnsupportedModel(
            f'{name} is {found!r}, and the llama engine implements {" and ".join(allowed)}: try engine="transformers".'
        )


def _refuse_others(found: Mapping[str, Any], known: Iterable[str]) -> None:
    # None, False, 0 and empty say that a feature is off, and what is off needs no implementation; names with an
    # underscore are a library's notes to itself.
    others = {name for name in found if found[name] and not name.startswith("_")} - set(known)
    if others:
        settings = ", ".join(f"{name}={found[name]!r}" for name in sorted(others))
        raise UnsupportedModel(f'The llama engine does not implement {settings}: try engine="transformers".')
