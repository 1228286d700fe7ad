"""Where weights come from: a folder in the layout of transformers, or in Meta's own.

A rank reads its slice of each weight. A weight that is missing, misshaped or left over is an error, never a default.
"""

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast  # a stored weight: a tensor, or safetensors' slice, which has no type of its own

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from jackfield.engines.llama.args import CacheSize, ModelArgs, args_from_config, args_from_params
from jackfield.engines.llama.layers import Transformer
from jackfield.engines.llama.parallel import ParallelLinear, num_ranks, share
from jackfield.engines.llama.rotary import interleaved
from jackfield.errors import UnknownModel, UnsupportedModel

_TRANSFORMERS = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "layers": "model.layers",
    "attention": "self_attn", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "feed_forward": "mlp",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The stored parts of each weight, and their names there; `half_split`: rows of q and k in transformers' order."""

    args: ModelArgs
    parts: Mapping[str, Sequence[Any]]
    names: Mapping[str, str]
    half_split: bool

    def stored(self, name: str) -> str:
        """What the checkpoint calls our parameter `name`."""
        return ".".join(self.names.get(word, word) for word in name.split("."))

    def read(self, name: str, whole: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """What lies at `index` of a weight of shape `whole`. UnsupportedModel where it is missing or has another."""
        if self.stored(name) not in self.parts:
            raise UnsupportedModel(f"The checkpoint has no weight {self.stored(name)}, which its configuration needs.")
        weight = _join(self.stored(name), self.parts[self.stored(name)], whole)[index]
        if not self.half_split or name.split(".")[-2] not in ("wq", "wk"):
            return weight
        heads = weight.unflatten(0, (-1, self.args.d_head)).movedim(1, -1)
        return interleaved(heads).movedim(-1, 1).flatten(0, 1)


def _join(name: str, parts: Sequence[Any], whole: tuple[int, ...]) -> Any:
    # Which axis was shared out follows from the shapes: that of the embedding differs between Llama 2 and 3.
    shape = tuple(parts[0].shape if isinstance(parts[0], Tensor) else parts[0].get_shape())
    if shape == whole:  # one part, or a norm, alike in each
        return parts[0]
    for axis in range(len(shape)):
        if (*shape[:axis], shape[axis] * len(parts), *shape[axis + 1 :]) == whole:
            return torch.cat(list(parts), axis)
    raise UnsupportedModel(f"The weight {name} is {len(parts)} times {shape}: the configuration makes it {whole}.")


def load(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **cache: Unpack[CacheSize],
) -> Transformer:
    """This rank's part of the model in `folder`, frozen; `dtype` None is each weight's own.

    UnknownModel: neither layout is there, or a file is broken. UnsupportedModel: a setting that is not implemented, a
    number of ranks that does not divide it, a weight that is missing, misshaped or left over.
    """
    try:
        checkpoint = _open(folder, cache)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise UnknownModel(f"{folder} cannot be read: {error}") from error
    with torch.device("meta"):
        model = Transformer(checkpoint.args)
    _fill(model, checkpoint, dtype, device)
    model.tie()
    model.allocate_cache()
    return model.eval()


def _open(folder: Path, cache: CacheSize) -> Checkpoint:
    if (folder / "params.json").is_file():
        params = json.loads((folder / "params.json").read_text())
        files = sorted(folder.glob("consolidated.*.pth"))
        shards = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]
        if not shards or "output.weight" not in shards[0]:
            raise UnknownModel(f"{folder} holds params.json, but no consolidated.*.pth with output.weight.")
        parts = {name: [shard[name] for shard in shards] for name in shards[0]}
        vocab_size = sum(len(part) for part in parts["output.weight"])
        return Checkpoint(args_from_params(params, cache, vocab_size), parts, {}, half_split=False)
    if not (folder / "config.json").is_file():
        raise UnknownModel(f"{folder} holds neither config.json (transformers) nor params.json (Meta).")
    config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder))
    args = args_from_config(config, cache)
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    handles: list[Any] = [safe_open(folder / name, framework="pt") for name in sorted(names)]
    stored: dict[str, list[Any]] = {
        name: [handle.get_slice(name)] for handle in handles for name in handle.offset_keys()
    }
    return Checkpoint(args, stored, _TRANSFORMERS, half_split=True)


def _fill(model: Transformer, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str) -> None:
    names = [name for name, _ in model.named_parameters() if not (model.args.tied and name == "output.weight")]
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        part = checkpoint.read(name, *_place(module, leaf)).to(device, dtype).contiguous()
        setattr(module, leaf, nn.Parameter(part, requires_grad=False))
    used = {checkpoint.stored(name) for name in [*names, "output.weight"]}
    extra = [name for name in checkpoint.parts if name not in used and not name.endswith(("inv_freq", "rope.freqs"))]
    if extra:
        raise UnsupportedModel(f"The checkpoint has weights that nothing here uses: {', '.join(extra[:5])}.")


def _place(module: nn.Module, leaf: str) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """The shape of a whole parameter, and where this rank's part is in it."""
    shape = list(module.get_parameter(leaf).shape)
    index = [slice(None)] * len(shape)
    axis = module.sharded.get(leaf) if isinstance(module, ParallelLinear) else None
    if axis is not None:
        shape[axis] *= num_ranks()
        index[axis] = share(shape[axis], "entries")
    return tuple(shape), tuple(index)
