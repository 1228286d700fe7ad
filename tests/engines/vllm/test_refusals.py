"""What vLLM cannot start with, in the errors of the other engines; an engine beside it goes on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import jackfield as jf
from tests import zoo
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import prompt_of

pytestmark = pytest.mark.slow

PROMPT = prompt_of(9, 0)
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def first() -> Iterator[jf.Model]:
    with tiny.llama(num_gpu_blocks_override=40) as model:
        yield model


def saved(folder: Path) -> Path:
    zoo.build("llama", head_dim=32).save_pretrained(folder)
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def misshape(path: Path) -> None:
    save_file(load_file(path) | {"model.layers.0.mlp.down_proj.weight": torch.ones(3, 3)}, path, {"format": "pt"})


def rename(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "frobnicator"}))


FOLDERS: dict[str, tuple[str, Callable[[Path], Any], type[Exception], str]] = {
    "cut weights": (WEIGHTS, cut, jf.UnknownModel, r"weights cannot be read: model\.safetensors is broken: \S"),
    "no weights": (WEIGHTS, Path.unlink, jf.UnknownModel, "weights cannot be read: it holds no weights"),
    "a misshaped weight": (WEIGHTS, misshape, jf.UnsupportedModel, "vLLM could not load .*: start"),
    "no configuration": (CONFIG, Path.unlink, jf.UnknownModel, "that folder holds no model: there is no config.json"),
    "a cut configuration": (CONFIG, cut, jf.UnsupportedModel, "vLLM could not load .* not a valid JSON"),
    "no known architecture": (CONFIG, rename, jf.UnsupportedModel, "(?s)vLLM could not load .*frobnicator"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "none of vLLM's": (
        {"max_num_sequences": 3},
        "max_num_sequences: vLLM has no such option. Did you mean 'max_num_seqs'",
    ),
    "of another type": (
        {"max_model_len": "x"},
        "max_model_len='x': vLLM does not take this: Input should be a valid int",
    ),
    "out of its range": ({"gpu_memory_utilization": 3.0}, r"gpu_memory_utilization=3\.0: vLLM does not take this"),
    "no dtype": ({"dtype": "float31"}, "dtype='float31' is no floating dtype of torch"),
    "a dtype that vLLM has not": ({"dtype": torch.float64}, "dtype='float64': vLLM does not take this"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_broken(name: str, first: jf.Model, tmp_path: Path) -> None:
    """Kills: letting what vLLM raises go on, and taking an engine's groups down when another fails beside it."""
    file, spoil, error, message = FOLDERS[name]
    before = first.run(PROMPT, max_tokens=3).token_ids
    spoil(saved(tmp_path) / file)
    with pytest.raises(error, match=message):
        tiny.start_folder(tmp_path, skip_tokenizer_init=True)
    assert first.run(PROMPT, max_tokens=3).token_ids == before


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_none(name: str, first: jf.Model, tmp_path: Path) -> None:
    options, message = OPTIONS[name]
    before = first.run(PROMPT, max_tokens=3).token_ids
    with pytest.raises(jf.InvalidRequest, match=message):
        tiny.start_folder(saved(tmp_path), **options)
    assert first.run(PROMPT, max_tokens=3).token_ids == before


@pytest.mark.parametrize("name", ["no-one/has-this-model", "./nothing/here", "/nothing/here", "not a name!"])
def test_a_name_that_nothing_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(jf.UnknownModel, match="there is no such folder here, and no such model under that name"):
        tiny.start_folder(name)


def test_a_source_that_is_no_folder_and_no_hub_name() -> None:
    with pytest.raises(jf.UnsupportedModel, match="vLLM could not load s3://nobody/nothing"):
        tiny.start_folder("s3://nobody/nothing")


def test_weights_that_another_process_could_not_read(tmp_path: Path) -> None:
    """That process has written why to its log, and says no more."""
    cut(saved(tmp_path) / WEIGHTS)
    with pytest.raises(jf.UnknownModel, match=r"model\.safetensors is broken"):
        tiny.start_folder(tmp_path, processes=True, skip_tokenizer_init=True)
