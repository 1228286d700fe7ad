"""Soft caps count, or it is said that they do not: transformers' sdpa attention leaves them out."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import jackfield as jf
from tests import zoo

PROMPT = [(7 * i) % 120 + 3 for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma2")
    zoo.build("gemma2").save_pretrained(path)
    return path


def scores(model: jf.Model) -> torch.Tensor:
    result = model.run(PROMPT, lambda model, t: model.layers[1].attention_scores)
    return result.returned[torch.isfinite(result.returned)]


def test_a_capped_model_that_is_loaded_by_its_folder_computes_what_eager_attention_does(folder: Path) -> None:
    model = jf.Model(folder)
    assert model.layers[1].attention.softcap == 2.0
    assert 1 < scores(model).abs().max() <= 2
    logits = model.run(PROMPT, lambda model, t: model.logits).returned
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(logits, eager(torch.tensor([PROMPT])).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_another_model_keeps_the_attention_that_transformers_gives_it(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    assert jf.Model(tmp_path).config._attn_implementation == "sdpa"  # pyright: ignore[reportPrivateUsage]


def test_an_implementation_that_is_asked_for_stays_and_warns(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"leaves out the soft cap \(2\)"):
        model = jf.Model(folder, attn_implementation="sdpa")
    assert model.layers[1].attention.softcap is None
    assert scores(model).abs().max() > 2


def test_a_model_that_is_handed_over_stays_as_it_is_and_warns() -> None:
    raw = zoo.build("gemma2", attn="sdpa")
    with pytest.warns(UserWarning, match="leaves out the soft cap"):
        model = jf.Model(raw)
    assert raw.config._attn_implementation == "sdpa"  # pyright: ignore[reportPrivateUsage]
    assert model.layers[1].attention.softcap is None
    raw.set_attn_implementation("eager")
    assert model.layers[1].attention.softcap == 2.0
    assert scores(model).abs().max() <= 2


def test_an_attention_that_caps_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = jf.Model(zoo.build("gemma2", attn="eager"))
    assert model.layers[1].attention.softcap == 2.0
