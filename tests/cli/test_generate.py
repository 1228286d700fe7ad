"""`jackfield generate`: steering does what the same addition by a hook does."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import jackfield as jf
from tests.engines.tiny_tokenizers import words

PROMPT = "t20 t30 t40"


@pytest.fixture
def vector(tmp_path):
    direction = torch.randn(64, generator=torch.Generator().manual_seed(3))
    save_file({"direction": direction}, tmp_path / "v.safetensors")
    torch.save(direction.bfloat16(), tmp_path / "v.pt")
    return direction


def generated_with_a_hook(folder: str, addition: torch.Tensor | None, layer: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    if addition is not None:
        model.model.layers[layer].register_forward_hook(lambda module, args, output: output + addition)
    ids = words()(PROMPT, return_tensors="pt").input_ids
    kept = model.generate(ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    return kept[0, ids.shape[1] :].tolist()


def test_steering_equals_a_hook(say, folder, vector):
    said = say(
        "generate", PROMPT, "--model", folder, "--max-tokens", "6", "--json",
        "--steer", "v.safetensors", "--layer", "2", "--scale", "0.5",
    )  # fmt: skip
    result = json.loads(said.out)
    assert result["token_ids"] == generated_with_a_hook(folder, 0.5 * vector, 2)
    assert result["token_ids"] != generated_with_a_hook(folder, None, 2)
    assert result["token_ids"] != generated_with_a_hook(folder, 0.5 * vector, 1)
    assert result["steer"] == {"file": "v.safetensors", "layer": 2, "scale": 0.5}


def test_a_scale_of_zero_changes_nothing(say, folder, vector):
    plain = say("generate", PROMPT, "--model", folder, "--max-tokens", "6")
    steered = say(
        "generate", PROMPT, "--model", folder, "--max-tokens", "6", "--steer", "v.pt", "--layer", "0", "--scale", "0"
    )
    assert plain.out == steered.out
    assert plain.out.startswith(PROMPT)


def test_chat_uses_the_template(say, folder):
    result = json.loads(say("generate", "t20", "--model", folder, "--chat", "--json", "--max-tokens", "1").out)
    assert result["prompt_token_ids"] == words()("user t20 assistant").input_ids


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": torch.ones(64), "b": torch.ones(64)}, "should hold one tensor, and holds 2 entries"),
        ({"a": torch.ones(1, 64)}, r"a vector \[d_model\], and holds a tensor of shape \[1, 64\]"),
        ({"a": torch.ones(63)}, "a vector of 63, and the model's stream is 64 wide"),
        ({"a": torch.full((64,), torch.inf)}, "not finite"),
    ],
    ids=["two", "two axes", "narrow", "infinite"],
)
def test_a_bad_vector_is_status_2(say, folder, tmp_path, content, text):
    save_file(content, tmp_path / "bad.safetensors")
    said = say("generate", PROMPT, "--model", folder, "--steer", "bad.safetensors", "--layer", "0")
    assert said.status == 2
    assert pytest.RaisesExc(Exception, match=text).matches(Exception(said.err))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("absent.pt", None, "there is no file absent.pt"),
        ("v.npy", b"", "should end in .safetensors or .pt"),
        ("torn.safetensors", b"torn", "torn.safetensors cannot be read"),
        ("torn.pt", b"torn", "torn.pt cannot be read"),
    ],
    ids=["absent", "kind", "torn safetensors", "torn pt"],
)
def test_a_bad_file_is_status_2(say, tmp_path, name, content, text):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = say("generate", PROMPT, "--steer", name, "--layer", "0")
    assert said.status == 2
    assert text in said.err


def test_code_in_a_pt_file_does_not_run(say, tmp_path):
    torch.save({"code": print}, tmp_path / "code.pt")
    said = say("generate", PROMPT, "--steer", "code.pt", "--layer", "0")
    assert (said.status, said.out) == (2, "")
    assert "cannot be read" in said.err


def test_steer_and_layer_go_together(say):
    said = say("generate", PROMPT, "--layer", "0")
    assert said.status == 2
    assert "give both --steer and --layer" in said.err


def test_interventions_are_read_from_a_file(say, folder, vector, tmp_path):
    edits = [jf.Steer("layers.2.layer_output", vector, 0.5), jf.Capture("layers.0.layer_output", "last")]
    (tmp_path / "edits.json").write_text(jf.to_json(edits))
    said = say(
        "generate", PROMPT, "--model", folder, "--max-tokens", "6", "--json", "--interventions", "edits.json"
    )  # fmt: skip
    result = json.loads(said.out)
    assert result["token_ids"] == generated_with_a_hook(folder, 0.5 * vector, 2)
    assert result["interventions"] == "edits.json"


def test_one_intervention_and_a_steering_vector_go_together(say, folder, vector, tmp_path):
    (tmp_path / "edit.json").write_text(jf.Steer("layers.2.layer_output", vector, -0.5).to_json())
    arguments = ("--steer", "v.safetensors", "--layer", "2", "--scale", "1", "--interventions", "edit.json")
    said = say("generate", PROMPT, "--model", folder, "--max-tokens", "6", "--json", *arguments)
    assert json.loads(said.out)["token_ids"] == generated_with_a_hook(folder, 0.5 * vector, 2)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (None, 2, "there is no file edits.json"),
        ("[", 2, "edits.json: This is not JSON"),
        ('[{"format": 1, "kind": "Skipp"}]', 2, "no kind of intervention 'Skipp'"),
        ('{"format": 1, "kind": "Skip", "layers": [99]}', 1, "there is no layer 99"),
    ],
    ids=["absent", "torn", "kind", "layer"],
)
def test_a_bad_file_of_interventions(say, folder, tmp_path, text, status, message):
    if text is not None:
        (tmp_path / "edits.json").write_text(text)
    said = say("generate", PROMPT, "--model", folder, "--interventions", "edits.json")
    assert (said.status, said.out) == (status, "")
    assert message in " ".join(said.err.replace("│", " ").split())
