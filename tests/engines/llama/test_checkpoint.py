"""Checkpoints of both layouts, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any  # settings of a configuration

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from jackfield.engines.llama.checkpoint import args_from_config, args_from_params, load
from jackfield.engines.llama.layers import ModelArgs, Transformer
from jackfield.errors import UnknownModel, UnsupportedModel
from tests import zoo
from tests.engines.llama.native import both

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "norm_eps": 1e-5}


def config(**over: Any) -> LlamaConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, **over)


@torch.no_grad()
def logits(model: Transformer) -> Tensor:
    return model(torch.arange(3, 11)[None])


# transformers' layout.


def test_files_by_index_are_the_single_file(tmp_path: Path) -> None:
    theirs, whole = both("grouped heads", tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "parts")), logits(whole))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    _, model = both("tied", tmp_path)
    assert model.output.weight is model.tok_embeddings.weight
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_a_head_that_is_stored_too_is_tied_where_it_is_the_embedding(tmp_path: Path) -> None:
    _, tied = both("tied", tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    model = load(tmp_path)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(logits(model), logits(tied))


def test_a_head_of_its_own_is_used_as_transformers_uses_it(tmp_path: Path) -> None:
    both("tied", tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": torch.randn(zoo.VOCAB, 64)}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        want = theirs(torch.arange(3, 11)[None]).logits
    torch.testing.assert_close(logits(load(tmp_path)), want, rtol=1e-4, atol=1e-4)


def test_weights_arrive_frozen_in_the_dtype_asked_for(tmp_path: Path) -> None:
    both("grouped heads", tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16, max_batch_size=2, max_seq_len=32)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}
    cache = model.layers[0].attention.cache_k
    assert (cache.dtype, cache.shape) == (torch.bfloat16, (2, 32, 2, 16))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    both("grouped heads", tmp_path)
    rewrite(tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"no weight model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_misshaped_weight_is_named_with_both_shapes(tmp_path: Path) -> None:
    both("grouped heads", tmp_path)
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(tmp_path, lambda weights: weights.update({name: torch.zeros(16, 64)}))
    with pytest.raises(UnsupportedModel, match=r"k_proj\.weight is 1 times \(16, 64\): .* makes it \(32, 64\)"):
        load(tmp_path)


def test_a_weight_left_over_is_named(tmp_path: Path) -> None:
    both("grouped heads", tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(UnsupportedModel, match=r"nothing here uses: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(tmp_path)


def test_old_checkpoints_may_hold_their_frequencies(tmp_path: Path) -> None:
    _, model = both("grouped heads", tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"neither config\.json \(transformers\) nor params\.json \(Meta\)"):
        load(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    both("grouped heads", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnknownModel, match=r"cannot be read"):
        load(tmp_path)


# Settings.


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (MistralConfig(sliding_window=8), r"does not implement sliding_window=8"),
        (config(quantization_config={"quant_method": "gptq"}), r"does not implement quantization_config="),
        (config(logits_scaling=8.0), r"does not implement logits_scaling=8\.0"),
        (config(hidden_act="gelu"), r"does not implement hidden_act='gelu'"),
        (config(is_causal=False), r"does not implement is_causal=False"),
        (zoo.config("qwen3"), r"does not implement model_type='qwen3'"),
        (
            config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            r"does not implement rope_type='dynamic'",
        ),
        (
            config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            r"does not implement partial_rotary_factor=0\.5",
        ),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(refused: LlamaConfig, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        args_from_config(refused)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"n_heads=6 is not a multiple of n_kv_heads=4"):
        ModelArgs(dim=48, n_heads=6, n_kv_heads=4)
    with pytest.raises(UnsupportedModel, match=r"head_dim=9 is odd"):
        ModelArgs(dim=36, n_heads=4)


def test_settings_of_a_hub_configuration() -> None:
    llama = config(head_dim=24, tie_word_embeddings=True, is_llama_config=True, rope_interleaved=False)
    args = args_from_config(llama)
    assert (args.dim, args.d_head, args.tied) == (64, 24, True)
    assert args.rope_type == "default"


@pytest.mark.parametrize(
    ("sizes", "neurons"),
    [
        ({"dim": 4096, "multiple_of": 256}, 11008),  # Llama 2 7B
        ({"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),  # Llama 3 8B
        ({"dim": 2048, "multiple_of": 256, "ffn_dim_multiplier": 1.5}, 8192),  # Llama 3.2 1B
        ({"dim": 4096, "ffn_dim": 100}, 100),
    ],
)
def test_neurons_by_metas_rule(sizes: dict[str, Any], neurons: int) -> None:
    assert ModelArgs(**sizes).d_mlp == neurons


def test_scaled_frequencies_of_params() -> None:
    scaled = args_from_params({"use_scaled_rope": True}, 9)
    assert (scaled.rope_type, scaled.rope_scaling_factor) == ("llama3", 8.0)
    assert args_from_params({"use_scaled_rope": True, "rope_scaling_factor": 32}, 9).rope_scaling_factor == 32
    assert args_from_params({}, 9).rope_type == "default"
    with pytest.raises(UnsupportedModel, match=r"does not implement lora_args="):
        args_from_params({"lora_args": {"rank": 16}}, 9)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"rope_type": "yarn"}, r"does not implement rope_type='yarn'"),
        ({"rope_type": "llama3", "use_scaled_rope": True}, r"does not implement rope_type='llama3'"),
        ({"rope_scaling_factor": 4}, r"does not implement rope_scaling_factor=4"),
        ({"vocab_size": 8}, r"vocab_size is 8, and the weights are of 9 tokens"),
    ],
)  # fmt: skip
def test_params_that_would_be_passed_over_are_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        args_from_params(params, 9)


@pytest.mark.parametrize("text", ["[1]", '{"n_heads": "6"}', "{"])
def test_params_that_are_no_sizes_are_refused(text: str, tmp_path: Path) -> None:
    save_meta(tmp_path, 1)
    (tmp_path / "params.json").write_text(text)
    with pytest.raises(UnknownModel, match=r"cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.mlp.up_proj"])
def test_whole_numbers_are_no_weights(name: str, tmp_path: Path) -> None:
    both("grouped heads", tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({f"{name}.weight": weights[f"{name}.weight"].to(torch.int8)}))
    with pytest.raises(UnsupportedModel, match=rf"no weight {name}\.weight in floating point"):
        load(tmp_path)


# Meta's layout.


def save_meta(folder: Path, files: int, embedding_axis: int = 0) -> Transformer:
    """A model with random weights, and Meta's files of it, shared out over `files` ranks."""
    torch.manual_seed(0)
    model = Transformer(ModelArgs(**SIZES, vocab_size=64, max_seq_len=32)).requires_grad_(False)
    (folder / "params.json").write_text(json.dumps({**SIZES, "vocab_size": -1}))
    axes = {"wo": 1, "w2": 1, "tok_embeddings": embedding_axis}
    for file in range(files):
        shard = {"rope.freqs": torch.ones(4)}
        for name, weight in model.state_dict().items():
            axis = axes.get(name.split(".")[-2], 0)
            shard[name] = weight if weight.ndim == 1 else weight.chunk(files, axis)[file].clone()
        torch.save(shard, folder / f"consolidated.{file:02}.pth")
    return model


@pytest.mark.parametrize(("files", "embedding_axis"), [(1, 0), (2, 0), (2, 1), (4, 0)])
def test_metas_files_are_joined(files: int, embedding_axis: int, tmp_path: Path) -> None:
    model = save_meta(tmp_path, files, embedding_axis)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_metas_weights_need_a_head(tmp_path: Path) -> None:
    save_meta(tmp_path, 1)
    torch.save({"tok_embeddings.weight": torch.ones(64, 32)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UnknownModel, match=r"no consolidated\.\*\.pth with output\.weight"):
        load(tmp_path)


class Payload:
    """What a hostile file would hold: an object whose loading runs code."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return print, ("ran",)


def test_metas_files_are_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_meta(tmp_path, 1)
    torch.save({"output.weight": Payload()}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UnknownModel, match=r"cannot be read"):
        load(tmp_path)
    assert "ran" not in capsys.readouterr().out
