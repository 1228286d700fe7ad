"""`jackfield look`: its numbers are those of transformers, run by itself."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from jackfield.cli.reading import strongest, top
from tests.engines.tiny_tokenizers import words

PROMPT = "t20 t30 t40 t20 t30"


@pytest.fixture(scope="module")
def truth(folder):
    """transformers' own attention patterns [layer head query key] and stream of the first layer, after its block."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        out = model(words()(PROMPT, return_tensors="pt").input_ids, output_attentions=True, output_hidden_states=True)
        first = model.lm_head(model.model.norm(out.hidden_states[1]))[0].softmax(-1)
    return torch.cat(out.attentions), first, out.logits[0].softmax(-1)


def test_json_says_what_the_model_computes(say, folder, truth):
    said = say("look", PROMPT, "--model", folder, "--json", "--no-picture")
    page = json.loads(said.out)
    patterns, first, last = truth
    assert [token["text"] for token in page["tokens"]] == ["<s>", *PROMPT.split()]
    assert page["next"]["id"] == last[-1].argmax()
    for lens, expected in ((page["lens"][0], first), (page["lens"][-1], last)):
        torch.testing.assert_close(torch.tensor(lens["probabilities"]), expected.max(-1).values, atol=1e-5, rtol=1e-4)
        assert lens["ids"] == expected.argmax(-1).tolist()
    for edge in page["edges"]:
        found = patterns[edge["layer"], edge["head"], edge["query"], edge["key"]]
        assert edge["probability"] == pytest.approx(float(found), rel=1e-4)


def test_edges_are_the_strongest_of_all_layers(say, folder, truth):
    page = json.loads(say("look", PROMPT, "--model", folder, "--json", "--no-picture", "--edges", "5").out)
    patterns, _, _ = truth
    counted = patterns.clone()
    counted[..., 0] = 0
    counted.diagonal(dim1=-2, dim2=-1).zero_()
    expected = counted.flatten().topk(5).values.tolist()
    assert [edge["probability"] for edge in page["edges"]] == pytest.approx(expected, rel=1e-4)
    assert page["layer"] == page["edges"][0]["layer"]


def test_a_layer_alone(say, folder):
    page = json.loads(say("look", PROMPT, "--model", folder, "--json", "--layer", "2", "--no-picture").out)
    assert {edge["layer"] for edge in page["edges"]} == {2}
    assert len(page["lens"]) == 4


def test_page_for_people(say, folder, tmp_path):
    said = say("look", PROMPT, "--model", folder)
    assert 'Tokens  0 "<s>"  1 "t20"' in said.out
    assert "Logit lens" in said.out
    assert "Strongest attention edges" in said.out
    assert "are in jackfield-look.png" in said.err
    assert (tmp_path / "jackfield-look.png").read_bytes().startswith(b"\x89PNG")


def test_picture_goes_where_it_is_asked_for(say, folder, tmp_path):
    said = say("look", PROMPT, "--model", folder, "--picture", tmp_path / "page.svg", "--json")
    assert json.loads(said.out)["picture"] == str(tmp_path / "page.svg")
    assert "<svg" in (tmp_path / "page.svg").read_text()


def test_one_token_has_no_edges(say, folder):
    page = json.loads(say("look", "", "--model", folder, "--json", "--no-picture").out)
    assert page["edges"] == []
    assert page["layer"] == 0


def test_strongest_leaves_out_rest_and_self_on_a_decode_step():
    pattern = torch.tensor([[[0.5, 0.1, 0.0, 0.4], [0.2, 0.3, 0.3, 0.2]]])[:, :1]  # one query: position 3
    edges = strongest(pattern, layer=7, count=9)
    assert [(edge.layer, edge.head, edge.query, edge.key) for edge in edges] == [(7, 0, 3, 1)]


def test_top_is_exact_in_bfloat16():
    logits = torch.zeros(2, 1000, dtype=torch.bfloat16)
    logits[0, 3] = 1.0
    found = top(logits, layer=0)
    assert found.ids[0] == 3
    assert found.probabilities[1] == pytest.approx(1e-3, rel=1e-5)  # a softmax in bfloat16 misses by 1e-3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layer", "4"], "the model has layers 0 to 3, and 4 was asked for"),
        (["--layer", "-1"], "layers 0 to 3"),
        (["--edges", "0"], "--edges"),
        (["--picture", "page.txt"], "should end in .png, .pdf, .svg"),
        (["--picture", "nowhere/page.png"], "there is no folder"),
        (["--wrong"], "No such option"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_a_bad_argument_is_status_2(say, folder, arguments, text):
    said = say("look", PROMPT, "--model", folder, *arguments)
    assert (said.status, said.out) == (2, "")
    assert text in said.err
    assert "Traceback" not in said.err
