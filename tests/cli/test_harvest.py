"""`jackfield harvest`: what hooks see, in the files."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import jackfield as jf
from tests.engines.tiny_tokenizers import words

LINES = ["t20 t30 t40", "t7", "t9 t11 t12 t13", "t50 t51"]
IDS = [words()(line).input_ids for line in LINES]


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "p.txt").write_text("".join(line + "\n" for line in LINES))
    listed = [{"text": LINES[0]}, {"prompt": LINES[1]}, {"token_ids": IDS[2]}, {"text": LINES[3], "id": 7}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in listed))


@pytest.fixture
def directions(tmp_path):
    found = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    save_file({"probe": found}, tmp_path / "probe.safetensors")
    return found


def hooked(folder: str, layer: int) -> list[torch.Tensor]:
    """What leaves a layer, prompt by prompt: [token, 64]."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    seen = []
    model.model.layers[layer].register_forward_hook(lambda module, args, output: seen.append(output[0].detach()))
    for ids in IDS:
        model(torch.tensor([ids]))
    return seen


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("file", ["p.txt", "p.jsonl"])
def test_the_rows_are_what_hooks_see(say, folder, prompts, tmp_path, file):
    said = say("harvest", file, "--model", folder, "--layers", "1-2", "--out", "out", "--max-num-seqs", "3")
    assert said.status == 0, said.err
    assert said.out.startswith("4 prompts, 14 tokens, 14 rows in 1 file, 0.0 MB, in out")
    harvest = jf.Harvest(tmp_path / "out")
    assert harvest.read("token_ids").tolist() == [token for ids in IDS for token in ids]
    for layer in (1, 2):
        close(harvest.read(f"layers.{layer}.layer_output"), torch.cat(hooked(folder, layer)))
    assert "layers.0.layer_output" not in harvest.tensors


def test_a_reduced_probe_of_one_layer(say, folder, prompts, directions, tmp_path):
    arguments = ("--model", folder, "--layers", "2", "--probe", "probe.safetensors", "--top-k", "2", "--json")
    said = say("harvest", "p.txt", *arguments, "--out", "last", "--reduce", "last")
    report = json.loads(said.out)
    assert (report["rows"], report["finished"], report["failed"]) == (4, True, [])
    assert report["tensors"]["layers.2.layer_output.indices"] == ["int64", ["rows", 2]]
    products = torch.stack([rows[-1] @ directions.T for rows in hooked(folder, 2)])
    harvest = jf.Harvest(tmp_path / "last")
    close(harvest.read("layers.2.layer_output"), products.topk(2).values)
    assert harvest.read("layers.2.layer_output.indices").equal(products.topk(2).indices)

    say("harvest", "p.txt", *arguments, "--out", "mean", "--reduce", "mean")
    products = torch.stack([(rows @ directions.T).mean(0) for rows in hooked(folder, 2)])
    close(jf.Harvest(tmp_path / "mean").read("layers.2.layer_output"), products.topk(2).values)


def test_several_values_and_a_dtype(say, folder, prompts, tmp_path):
    arguments = ("--value", "mlp_output", "--value", "logits", "--reduce", "last", "--dtype", "bfloat16")
    assert say("harvest", "p.txt", "--model", folder, "--out", "out", "--layers", "0,3", *arguments).status == 2
    said = say("harvest", "p.txt", "--model", folder, "--out", "out", "--layers", "0", *arguments)
    assert said.status == 0, said.err
    tensors = jf.Harvest(tmp_path / "out").tensors
    assert (tensors["logits"].shape, tensors["layers.0.mlp_output"].dtype) == ((128,), "bfloat16")


def test_the_same_command_goes_on_and_another_is_refused(say, folder, prompts, tmp_path):
    arguments = ("harvest", "p.txt", "--model", folder, "--out", "out", "--shard-prompts", "1")
    first = say(*arguments)
    assert first.out.startswith("4 prompts, 14 tokens, 14 rows in 4 files")
    assert say(*arguments).out == first.out
    other = say(*arguments, "--value", "mlp_output")
    assert (other.status, other.out) == (1, "")
    assert "jackfield: out holds a harvest that was asked for otherwise" in other.err


def test_a_prompt_that_fails_is_told(say, folder, prompts, tmp_path):
    with (tmp_path / "p.txt").open("a") as file:
        file.write("t8 " * 300)
    said = say("harvest", "p.txt", "--model", folder, "--out", "out")
    assert (said.status, said.out[:22]) == (0, "4 prompts, 14 tokens, ")
    assert "1 of 5 prompts failed. Number 4: RequestTooLong: 301 prompt tokens" in said.err
    (tmp_path / "long.txt").write_text("t8 " * 300)
    assert say("harvest", "long.txt", "--model", folder, "--out", "none").status == 1


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("absent.txt", None, "there is no file absent.txt"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("latin.txt", b"one\ntwo\n\xe9t\xe9\n", "latin.txt, after line 0: this is not UTF-8"),
        ("x.jsonl", b'{"text": "t7"}\n{"text": \n', "x.jsonl, line 2: this is not JSON"),
        ("x.jsonl", b'{"text": "t7"}\n{"txt": "t8"}\n', "x.jsonl, line 2: write an object with one of text, prompt"),
        ("x.jsonl", b'{"text": "t7", "token_ids": [7]}\n', "line 1: write an object with one of"),
        ("x.jsonl", b'"t7"\n', "x.jsonl, line 1: write an object"),
        ("x.jsonl", b'{"token_ids": [7, "t8"]}\n', "x.jsonl, line 1: Item 1 of the prompt is 't8'"),
    ],
)
def test_a_bad_file_of_prompts_is_refused_before_anything_is_loaded(say, tmp_path, name, content, text):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = say("harvest", name, "--model", "nowhere", "--out", "out")
    assert (said.status, said.out) == (2, "")
    assert text in " ".join(said.err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--top-k", "2"], "it is of a probe's products: give --probe too"),
        (["--layers", "5-2"], "'5-2' says no layers"),
        (["--value", "layer_outptu"], "Did you mean 'layer_output'"),
        (["--probe", "p.txt"], "p.txt should end in .safetensors or .pt"),
        (["--probe", "cube.pt"], "should hold directions [n, d_model], and holds a tensor of shape [1, 1, 1]"),
        (["--reduce", "max"], "'max' is not one of 'last', 'mean'"),
    ],
)
def test_bad_options_are_status_2(say, prompts, tmp_path, arguments, text):
    torch.save(torch.ones(1, 1, 1), tmp_path / "cube.pt")
    said = say("harvest", "p.txt", "--model", "nowhere", "--out", "out", *arguments)
    assert (said.status, said.out) == (2, "")
    assert text in " ".join(said.err.replace("│", " ").split())


def test_the_bar_says_how_fast(say, folder, prompts, monkeypatch):
    """On a terminal, prompts and tokens per second; what was there before is no speed of this run."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    said = say("harvest", "p.txt", "--model", folder, "--out", "out")
    assert "4/4 prompts" in said.err
    assert "tokens/s" in said.err
