"""Models and tokenizers by name, folder or hand, and what is refused before it computes something else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import jackfield as jf
from jackfield.engines.transformers.loading import limits, load, parse_device, parse_dtype
from jackfield.errors import InvalidRequest, UnknownModel, UnsupportedModel
from tests import zoo
from tests.engines import tiny_tokenizers
from tests.engines.transformers import odd_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 llama with a tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    zoo.build("llama", dtype=torch.bfloat16).save_pretrained(path)
    tiny_tokenizers.words().save_pretrained(path)
    return path


def saved(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def tiny(kind: str, **sizes: object) -> PreTrainedModel:
    return AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=128, **sizes))


def test_a_folder_gives_the_checkpoint_as_saved_and_its_tokenizer(folder: Path) -> None:
    model, tokenizer = load(folder, device="cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer is not None
    assert tokenizer.encode("Hello t9") == [1, 5, 9]
    expected = zoo.build("llama", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_dtype_and_options_are_passed_on(folder: Path) -> None:
    model, tokenizer = load(str(folder), dtype="float32", device="cpu", attn_implementation="eager", tokenizer=False)
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == "eager"
    assert tokenizer is None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_without_a_tokenizer_gives_none(name: str, tmp_path: Path) -> None:
    """transformers makes an empty one for gpt2 and raises for llama."""
    _, tokenizer = load(saved(zoo.build(name), tmp_path), device="cpu")
    assert tokenizer is None


def test_a_tokenizer_can_come_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    bare = saved(zoo.build("llama"), tmp_path)
    ours = tiny_tokenizers.byte_level()
    assert load(bare, device="cpu", tokenizer=ours)[1] is ours
    assert load(bare, device="cpu", tokenizer=folder)[1] is not None


def test_a_broken_tokenizer_is_not_taken_for_none(tmp_path: Path) -> None:
    saved(zoo.build("llama"), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"tokenizer cannot be loaded.*Pass tokenizer=False"):
        load(tmp_path, device="cpu")


def test_a_loaded_model_stays_the_same_object() -> None:
    model = zoo.build("llama", fresh=True).train()
    assert load(model) == (model, None)
    assert not model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float32"}, "^dtype: the model is loaded already"),
        ({"device": "cpu", "revision": "x"}, "device, rev"),
    ],
)
def test_a_loaded_model_takes_no_options(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load(zoo.build("llama"), **arguments)


@pytest.mark.parametrize(
    "name", ["no-one/has-this-model", "nosuchmodel", "./nothing/here", "/nothing/here", "not a name!"]
)
def test_a_name_that_nothing_has_is_unknown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnknownModel, match="there is no such folder here, and as a hub name"):
        load(name, device="cpu")


@pytest.mark.parametrize("model", [None, 5, torch.nn.Linear(2, 2)], ids=lambda model: type(model).__name__)
def test_what_is_no_name_is_unknown(model: object) -> None:
    with pytest.raises(UnknownModel, match=f"A {type(model).__name__} is no model to load: give a hub name"):
        load(model)


def test_a_folder_without_a_model_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="that folder holds no model"):
        load(tmp_path, device="cpu")


def test_a_folder_without_weights_is_unknown(tmp_path: Path) -> None:
    zoo.config("llama").save_pretrained(tmp_path)
    with pytest.raises(UnknownModel, match="weights cannot be read"):
        load(tmp_path, device="cpu")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def misshape(path: Path) -> None:
    weights = load_file(path)
    save_file(weights | {"model.norm.weight": torch.ones(3)}, path, {"format": "pt"})


def pickle_and_cut(path: Path) -> None:
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()
    cut(path.with_name("pytorch_model.bin"))


def no_bytes(path: Path) -> None:
    path.unlink()
    path.with_name("pytorch_model.bin").touch()


@pytest.mark.parametrize("engine", ["transformers", "llama"])
def test_a_cut_file_of_weights_cannot_be_read(tmp_path: Path, engine: str) -> None:
    cut(saved(zoo.build("llama"), tmp_path) / "model.safetensors")
    with pytest.raises(UnknownModel, match=r"cannot be read: .*[Ii]ncomplete"):
        jf.Model(tmp_path, engine=engine)


@pytest.mark.parametrize("broken", [pickle_and_cut, no_bytes])
def test_a_broken_pickle_of_weights_cannot_be_read(tmp_path: Path, broken: Callable[[Path], None]) -> None:
    broken(saved(zoo.build("llama"), tmp_path) / "model.safetensors")
    with pytest.raises(UnknownModel, match=r"its weights cannot be read: pytorch_model\.bin is broken: \S"):
        load(tmp_path, device="cpu")


def test_an_index_that_is_no_json_cannot_be_read(tmp_path: Path) -> None:
    model = zoo.build("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    cut(tmp_path / "model.safetensors.index.json")
    with pytest.raises(UnknownModel, match=r"cannot be read: model\.safetensors\.index\.json is broken"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("engine", ["transformers", "llama"])
def test_a_misshaped_weight_is_named_with_both_shapes(tmp_path: Path, engine: str) -> None:
    misshape(saved(zoo.build("llama"), tmp_path) / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is .*\(3,\).*\(64,\)"):
        jf.Model(tmp_path, engine=engine)


def test_misshaped_weights_may_be_asked_for(tmp_path: Path) -> None:
    misshape(saved(zoo.build("llama"), tmp_path) / "model.safetensors")
    model, _ = load(tmp_path, device="cpu", ignore_mismatched_sizes=True)
    assert model.get_parameter("model.norm.weight").shape == (64,)
    with pytest.raises(UnsupportedModel, match="transformers cannot load it"):
        load(tmp_path, device="cpu", ignore_mismatched_sizes=False)


@pytest.mark.parametrize("engine", ["transformers", "llama"])
def test_a_configuration_that_is_no_json(tmp_path: Path, engine: str) -> None:
    cut(saved(zoo.build("llama"), tmp_path) / "config.json")
    with pytest.raises(UnsupportedModel, match=r"cannot read its configuration: .*not a valid JSON file"):
        jf.Model(tmp_path, engine=engine)


@pytest.mark.parametrize("engine", ["transformers", "llama"])
@pytest.mark.parametrize("wrong", [{"num_attention_heads": 3}, {"num_hidden_layers": "4"}], ids=str)
def test_a_configuration_that_transformers_refuses(tmp_path: Path, engine: str, wrong: dict[str, object]) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | wrong))
    with pytest.raises(UnsupportedModel, match="transformers cannot read its configuration") as caught:
        jf.Model(tmp_path, engine=engine)
    assert caught.value.__cause__ is not None


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "frobnicator"}')
    with pytest.raises(UnsupportedModel, match=r"cannot read its configuration: .*frobnicator"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            "t5",
            {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
            r"\(t5\) is an encoder-decoder",
        ),
        (
            "bert",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
            "reads in both directions",
        ),
        (
            "albert",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
            "is no causal language model",
        ),
    ],
)
def test_what_is_no_decoder_is_refused(kind: str, sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(saved(tiny(kind, **sizes), tmp_path), device="cpu")


def test_a_checkpoint_without_the_head_is_refused(tmp_path: Path) -> None:
    """transformers would draw the head at random."""
    with pytest.raises(UnsupportedModel, match=r"lacks lm_head.weight, which would be random"):
        load(saved(zoo.build("llama").model, tmp_path), device="cpu")


def test_a_loaded_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no language modelling head"):
        load(zoo.build("llama").model)


def test_a_loaded_encoder_decoder_is_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=128, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load(AutoModelForSeq2SeqLM.from_config(config))


def test_a_configuration_that_no_cache_can_be_made_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would load, and fail inside `generate`. An attribute_map is enough."""
    model = odd_models.draw(odd_models.OddRepeating)
    with pytest.raises(UnsupportedModel, match=r"looked for num_hidden_layers, which OddConfig should have.*no attrib"):
        load(model)
    monkeypatch.setattr(odd_models.OddConfig, "attribute_map", {"num_hidden_layers": "depth"})
    assert load(model) == (model, None)


@pytest.mark.parametrize(
    ("given", "found"), [(None, "auto"), ("bfloat16", torch.bfloat16), ("torch.float16", torch.float16)]
)
def test_dtypes(given: str | None, found: object) -> None:
    assert parse_dtype(given) == found


@pytest.mark.parametrize("dtype", ["flaot32", "int8", torch.int64, "nn"])
def test_no_dtypes(dtype: torch.dtype | str) -> None:
    with pytest.raises(InvalidRequest, match="no floating dtype of torch"):
        parse_dtype(dtype)


@pytest.mark.parametrize("device", ["tpu", "cpu:x", "cuda:99"])
def test_no_devices(device: str) -> None:
    with pytest.raises(InvalidRequest, match=f"device='{device}' cannot be used"):
        parse_device(device)


def test_device_and_device_map_are_not_both_taken(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="both say where the model goes"):
        load(folder, device="cpu", device_map="cpu")


@pytest.mark.parametrize(
    ("name", "context", "setting"),
    [
        ("llama", 256, "max_position_embeddings"),
        ("gpt2", 256, "max_position_embeddings"),
        ("mpt", 256, "max_seq_len"),
        ("bloom", None, ""),
    ],
)
def test_limits(name: str, context: int | None, setting: str) -> None:
    found = limits(zoo.config(name))
    assert (found.vocab_size, found.context) == (128, context)
    assert setting in found.setting


@pytest.mark.slow
def test_a_configuration_with_a_text_part_is_a_text_model(tmp_path: Path) -> None:
    text = {**zoo.config("gemma3_text").to_dict(), "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    saved(AutoModelForCausalLM.from_config(config), tmp_path)
    model, _ = load(tmp_path, device="cpu")
    assert limits(model.config).context == 256
