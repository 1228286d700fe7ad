"""A model on two ranks, which the caller's process leads, against the same on one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # what a block returns

import pytest
import torch
import torch.distributed as dist

import jackfield as jf
from tests import zoo
from tests.engines.llama.test_engine import everything, native, saved

pytestmark = pytest.mark.slow
PROMPTS = [zoo.prompt("llama", 9)[0].tolist(), zoo.prompt("llama", 5)[0].tolist()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "llama/hd", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def one(folder: Path) -> jf.Model:
    return native(folder)


@pytest.fixture(scope="module")
def two(folder: Path, one: jf.Model) -> Iterator[jf.Model]:
    with native(folder, tensor_parallel_size=2) as model:
        yield model
    assert not dist.is_initialized()


def same(found: list[jf.Result], expected: list[jf.Result]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert got.token_ids == want.token_ids
        for mine, yours in zip(got.returned, want.returned, strict=True):
            assert mine.keys() == yours.keys()
            for at in mine:
                torch.testing.assert_close(mine[at], yours[at], rtol=1e-4, atol=1e-4)


def test_the_second_rank_holds_its_part_alone(two: jf.Model) -> None:
    attention = two.layers[0].attention
    assert (attention.n_heads, attention.n_local_heads) == (two.num_heads, two.num_heads // 2)
    assert attention.cache_k.shape[2] == two.num_kv_heads // 2


def test_every_value_is_that_of_one_rank(one: jf.Model, two: jf.Model) -> None:
    same(*(model.run(PROMPTS, everything, max_tokens=3, ignore_eos=True) for model in (two, one)))


def edits(m: jf.Model, t: Any) -> list[dict[str, torch.Tensor]]:
    """Edits of what is shared out and of what is not, of heads of the second rank, a skip, and what comes of them."""
    found = []
    for _ in t.iter[:]:
        m.layers[0].attention_values[:, -1] *= -1
        m.layers[0].attention_probabilities[:, -1] = m.layers[0].attention_probabilities[:, -1].flip(-1)
        results = m.layers[0].attention_head_results
        m.layers[1].mlp_activations[..., -5:] += 2
        m.layers[2].skip()
        stream = m.layers[-1].layer_output
        stream *= 1.1
        lens = m.project_on_vocab(stream)
        found.append({"results": results, "stream": stream, "lens": lens, "logits": m.logits})
    return found


def test_edits_are_those_of_one_rank(one: jf.Model, two: jf.Model) -> None:
    expected = one.run(PROMPTS, edits, max_tokens=3, ignore_eos=True)
    same(two.run(PROMPTS, edits, max_tokens=3, ignore_eos=True), expected)
    plain = one.run(PROMPTS[0], lambda m, t: m.logits).returned
    assert not torch.allclose(plain, expected[0].returned[0]["logits"], atol=1e-2)


def test_text_and_draws_are_those_of_one_rank(one: jf.Model, two: jf.Model) -> None:
    for sampling in ({}, {"temperature": 1.0, "top_k": 20, "seed": 3, "n": 2}):
        mine, yours = (model.run("t7 t8 t9", max_tokens=8, **sampling) for model in (two, one))
        assert (mine.text, mine.token_ids) == (yours.text, yours.token_ids)
    stream = torch.ones(3, one.hidden_size)
    torch.testing.assert_close(two.project_on_vocab(stream), one.project_on_vocab(stream), rtol=1e-4, atol=1e-4)


def test_the_attention_op_has_its_raw_places_and_modules_have_none(one: jf.Model, two: jf.Model) -> None:
    def op(m: jf.Model, t: Any) -> Any:
        (q, k, v), _ = m.layers[1].attention.attn.inputs
        return [{"q": q, "k": k, "v": v, "out": m.layers[1].attention.attn.output}]

    same([two.run(PROMPTS[0], op)], [one.run(PROMPTS[0], op)])
    with pytest.raises(jf.Unavailable, match="a module has a part of it on each of several ranks"):
        two.run(PROMPTS[0], lambda m, t: m.layers[1].attention.wo.input)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_what_ends_a_block_leaves_the_ranks_together(one: jf.Model, two: jf.Model, error: BaseException) -> None:
    def ends(m: jf.Model, t: Any) -> None:
        m.layers[1].layer_output *= 2
        raise error

    with pytest.raises(type(error)):
        two.run(PROMPTS[0], ends, max_tokens=2)
    assert two.run(PROMPTS[0], max_tokens=4).token_ids == one.run(PROMPTS[0], max_tokens=4).token_ids


def test_a_block_calls_no_module_and_gradients_do_not_cross_ranks(one: jf.Model, two: jf.Model) -> None:
    with pytest.raises(jf.Unavailable, match="A module runs on all of its 2 ranks or on none"):
        two.run(PROMPTS[0], lambda m, t: m.layers[0].mlp(m.layers[0].mlp_norm_output))
    with pytest.raises(jf.Unavailable, match="they do not cross ranks"):
        two.run(PROMPTS[0], gradients=True)
    assert two.run(PROMPTS[0]).token_ids == one.run(PROMPTS[0]).token_ids


def test_another_model_waits_until_this_one_is_closed(folder: Path, two: jf.Model) -> None:
    for size in (1, 2):
        with pytest.raises(jf.InvalidRequest, match="close the model that has several ranks first"):
            native(folder, tensor_parallel_size=size)


# On their own ranks: these end before, or without, the model above.


def in_a_process(code: str, *command: str) -> subprocess.CompletedProcess[str]:
    """What a program says, with two ranks or more in it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, *command, *(["-c", code] if code else [])]
    return subprocess.run(asked, capture_output=True, text=True, timeout=240, env=environment, check=False)


ENDS = """
import os, signal, jackfield as jf
try:
    jf.Model({mqa!r}, engine="llama", tensor_parallel_size=2)
except jf.UnsupportedModel as error:
    print(error)
model = jf.Model({folder!r}, engine="llama", tensor_parallel_size=2)
os.kill(model._engine._ranks._processes[0].pid, signal.SIGKILL)
try:
    model.run([5, 6, 7])
except jf.EngineDied as error:
    print(error)
model.close()
print(jf.Model({folder!r}, engine="llama").run([5, 6, 7]).finish_reason)
"""


def test_what_cannot_be_shared_is_refused_and_a_rank_that_died_is_an_error(folder: Path, tmp_path: Path) -> None:
    mqa = saved(tmp_path, "llama/mqa")
    ran = in_a_process(ENDS.format(mqa=str(mqa), folder=str(folder)))
    assert ran.stdout.splitlines() == [
        "1 key/value heads do not divide among 2 ranks.",
        "A rank of this model has ended: close it, and load it again.",
        "length",
    ], ran.stderr
    assert "Traceback" not in ran.stderr
    assert signal.SIGKILL  # how the rank ended


def test_torchrun_starts_the_command_on_two_ranks(folder: Path, one: jf.Model) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "jackfield")
    ran = in_a_process("", *command, "generate", "t7 t8 t9", "--model", str(folder), "--engine", "llama", "--json")
    assert ran.returncode == 0, ran.stderr
    text = one.run("t7 t8 t9", max_tokens=32).text
    assert ran.stdout.count('"text"') == 1  # of the leader alone
    assert f'"text": "{text}"' in ran.stdout
