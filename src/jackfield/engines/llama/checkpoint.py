"""Where a model comes from, sizes and weights: a folder in the layout of transformers, or in Meta's own.

A rank reads its slice of each weight. A setting that is not implemented is refused: without it, a model is another.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast  # Any: configuration values are whatever JSON holds

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  # a path-like of anything
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from jackfield.engines.llama.layers import ModelArgs, Transformer, interleaved
from jackfield.engines.llama.parallel import ColumnParallelLinear, RowParallelLinear, cut
from jackfield.errors import UnknownModel, UnsupportedModel

_CONFIG = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "norm_eps": "rms_norm_eps",
    "head_dim": "head_dim", "ffn_dim": "intermediate_size", "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias", "tied": "tie_word_embeddings", "rope_theta": "rope_theta", "rope_type": "rope_type",
    "rope_scaling_factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}  # fmt: skip
_ONE_OF = {
    "model_type": ("llama", "mistral"), "hidden_act": ("silu", "swish"), "is_causal": (True, None),
    "rope_type": ("default", "linear", "llama3"),
}  # fmt: skip
_NO_MATTER = {
    "max_position_embeddings", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
    "unk_token_id", "attention_dropout", "pretraining_tp", "is_llama_config", "transformers.js_config", "type",
}  # fmt: skip
_OF_LLAMA3 = {"rope_scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_TRANSFORMERS = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "layers": "model.layers",
    "attention": "self_attn", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "feed_forward": "mlp",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def load(
    folder: Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu", **cache: int
) -> Transformer:
    """This rank's part of the model in `folder`, frozen; `dtype` "auto" is the embedding's, `cache` sizes its cache.

    UnknownModel: neither layout is there, or a file is broken. UnsupportedModel: a setting that is not implemented, a
    number of ranks that does not divide it, a weight that is missing, misshaped or left over.
    """
    try:
        args, files, names = _open(folder)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise UnknownModel(f"{folder} cannot be read: {error}") from error
    with torch.device("meta"):
        model = Transformer(replace(args, **cache))
    _fill(model, {name: [file[name] for file in files if name in file] for one in files for name in one}, names)
    for attention in (layer.attention for layer in model.layers):
        attention.cache_k, attention.cache_v = (torch.zeros(attention.cache_k.shape) for _ in "kv")
    return model.to(device, dtype if isinstance(dtype, torch.dtype) else model.tok_embeddings.weight.dtype).eval()


def _open(folder: Path) -> tuple[ModelArgs, list[dict[str, Tensor]], dict[str, str]]:
    """The sizes, the weights of each file, which are mapped from it, and what those call our modules."""
    if (folder / "params.json").is_file():
        shards = sorted(folder.glob("consolidated.*.pth"))
        files = [torch.load(shard, map_location="cpu", mmap=True, weights_only=True) for shard in shards]
        if not files or "output.weight" not in files[0]:
            raise UnknownModel(f"{folder} holds params.json, but no consolidated.*.pth with output.weight.")
        vocab_size = sum(len(file["output.weight"]) for file in files)
        return args_from_params(dict(json.loads((folder / "params.json").read_text())), vocab_size), files, {}
    if not (folder / "config.json").is_file():
        raise UnknownModel(f"{folder} holds neither config.json (transformers) nor params.json (Meta).")
    args = args_from_config(cast("PretrainedConfig", AutoConfig.from_pretrained(folder)))
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    files = [load_file(folder / name) for name in names]
    both = [file[name] for file in files for name in file if name in ("lm_head.weight", "model.embed_tokens.weight")]
    tied = args.tied and (len(both) < 2 or torch.equal(*both))  # transformers 5 has it so
    return replace(args, tied=tied), files, _TRANSFORMERS | ({"output": "model.embed_tokens"} if tied else {})


def _fill(model: Transformer, parts: Mapping[str, Sequence[Tensor]], names: Mapping[str, str]) -> None:
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        stored = ".".join(names.get(word, word) for word in name.split("."))
        used.add(stored)
        module = model.get_submodule(name.rpartition(".")[0])
        axis = module.axis if isinstance(module, ColumnParallelLinear | RowParallelLinear) else None
        whole = tuple(size * model.ranks if at == axis else size for at, size in enumerate(parameter.shape))
        part = _joined(stored, parts.get(stored, ()), whole)
        if whole != parameter.shape:
            part = cut(part, axis, model.ranks)
        if names and name.split(".")[-2] in ("wq", "wk"):  # transformers has their rows in its own order of channels
            heads = part.reshape(-1, model.args.d_head, *part.shape[1:]).movedim(1, -1)
            part = interleaved(heads).movedim(-1, 1).flatten(0, 1)
        torch.utils.swap_tensors(parameter, nn.Parameter(part.contiguous(), requires_grad=False))
    # Some files hold frequencies, and some tied models their head once more.
    if extra := {name for name in parts if not name.endswith(("inv_freq", "rope.freqs", "lm_head.weight"))} - used:
        raise UnsupportedModel(f"The checkpoint has weights that nothing here uses: {', '.join(sorted(extra)[:5])}.")


def _joined(name: str, parts: Sequence[Tensor], whole: tuple[int, ...]) -> Tensor:
    """A weight of shape `whole` out of the parts in Meta's files; of transformers' there is one."""
    if not parts or not parts[0].is_floating_point():
        raise UnsupportedModel(f"The checkpoint has no weight {name} in floating point, which its configuration needs.")
    shape = tuple(parts[0].shape)
    if shape == whole:  # the one, or a norm, alike in each
        return parts[0]
    # Which axis was shared out follows from the shapes: that of the embedding differs between Llama 2 and 3.
    for axis in range(len(shape)):
        if (*shape[:axis], shape[axis] * len(parts), *shape[axis + 1 :]) == whole:
            return torch.cat(list(parts), axis)
    raise UnsupportedModel(f"The weight {name} is {len(parts)} times {shape}: the configuration makes it {whole}.")


def args_from_config(config: PretrainedConfig) -> ModelArgs:
    """The sizes in a configuration of transformers. UnsupportedModel names what is set there and not implemented."""
    found: dict[str, Any] = config.to_dict()
    found |= found.pop("rope_parameters", {})
    wrong = {name for name, known in _ONE_OF.items() if found.get(name) not in known}
    _refuse_others(found, {*_CONFIG.values(), *_ONE_OF, *_NO_MATTER, *PretrainedConfig().to_dict()}, wrong)
    return ModelArgs(**{ours: found[theirs] for ours, theirs in _CONFIG.items() if theirs in found})


def args_from_params(params: Mapping[str, Any], vocab_size: int) -> ModelArgs:
    """The sizes in Meta's `params.json`; `vocab_size` is the weights' own, since the file may say -1.

    `use_scaled_rope` alone means a factor of 8, as in Meta's code (llama-models, models/llama3/model.py). Llama 3.2
    was trained with 32, which its file does not say: add `"rope_scaling_factor": 32` there.
    """
    if params.get("vocab_size", -1) not in (-1, vocab_size):
        raise UnsupportedModel(f"vocab_size is {params['vocab_size']}, and the weights are of {vocab_size} tokens.")
    slowed = bool(params.get("use_scaled_rope"))
    names = {*_CONFIG, "multiple_of", "ffn_dim_multiplier"} - (set[str]() if slowed else _OF_LLAMA3)
    _refuse_others(params, names | {"use_scaled_rope"}, {"rope_type"} & params.keys())
    sizes: dict[str, Any] = {name: params[name] for name in names if name in params} | {"vocab_size": vocab_size}
    return ModelArgs(**sizes, rope_type="llama3" if slowed else "default")


def _refuse_others(found: Mapping[str, Any], known: Iterable[str], wrong: Iterable[str]) -> None:
    # None, False, 0 and empty say that a feature is off, and what is off needs no implementation; names with an
    # underscore are a library's notes to itself.
    others = set(wrong) or {name for name in found if found[name] and not name.startswith("_")}.difference(known)
    if others:
        settings = ", ".join(f"{name}={found.get(name)!r}" for name in sorted(others))
        raise UnsupportedModel(f'The llama engine does not implement {settings}: try engine="transformers".')
