"""vLLM's Llama against the native one, which writes every operation out: the same checkpoint, by value and by edit."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import jackfield as jf
from jackfield.engines.transformers.beside import Beside
from jackfield.engines.vllm.attention import PagedAttention
from tests import zoo
from tests.engines.transformers.reading import IN_ORDER, read_everything
from tests.engines.vllm.asking import prompt_of
from tests.engines.vllm.tiny import start_folder
from tests.reference.compare import assert_close

pytestmark = pytest.mark.slow

STEPS = 7
PROMPTS = [
    prompt_of(length, seed=length) for length in (30, 5, 12)
]  # the first goes on into a second block of the cache
ROOT = ("token_embeddings", "final_norm_output", "logits", "next_token_probabilities")
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A heated Llama of eight query heads on two key heads, 32 wide."""
    path = tmp_path_factory.mktemp("llama")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    zoo.build("llama", fresh=True, **sizes).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def native(folder: Path) -> jf.Model:
    return jf.Model(folder, engine="llama", tokenizer=False, max_seq_len=64)


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator[jf.Model]:
    options = {"skip_tokenizer_init": True, "max_model_len": 64, "num_gpu_blocks_override": 64}
    with start_folder(folder, **options) as found:
        yield found


@pytest.fixture(scope="module")
def expected(native: jf.Model) -> list[jf.Result]:
    """Every value of each prompt, alone in the native Llama."""
    return [run(native, [prompt])[0] for prompt in PROMPTS]


def run(model: jf.Model, prompts: list[list[int]], block: Any = read_everything) -> list[jf.Result]:
    return model.run(prompts, block, max_tokens=STEPS, ignore_eos=True)


def compare(found: jf.Result, expected: jf.Result) -> None:
    """Every value of every step, row by row."""
    assert found.token_ids == expected.token_ids
    for step, (got, want) in enumerate(zip(found.saved["steps"], expected.saved["steps"], strict=True)):
        assert got.keys() == want.keys()
        for layer, name in want:
            assert_close(got[layer, name], want[layer, name], name, where=f"step {step}, layer {layer}, ")


def test_both_serve_every_value(model: jf.Model, native: jf.Model, expected: list[jf.Result]) -> None:
    """So that nothing below is left out because one of them has it not."""
    names = {*ROOT, *IN_ORDER} - {"router_logits"}
    for one in (model, native):
        assert {name for name, reason in one.support(1).items() if reason is None} == names - {*ROOT}
        assert set(ROOT) <= {name for name, reason in one.support().items() if reason is None}
    for result in expected:
        assert len(result.saved["steps"]) == STEPS
        assert {name for _, name in result.saved["steps"][-1]} == names


def test_every_value_alone(model: jf.Model, expected: list[jf.Result]) -> None:
    for prompt, want in zip(PROMPTS, expected, strict=True):
        compare(run(model, [prompt])[0], want)


def test_every_value_in_company(model: jf.Model, expected: list[jf.Result]) -> None:
    for found, want in zip(run(model, PROMPTS), expected, strict=True):
        compare(found, want)


def pages_read_one_position_late(patch: Patch) -> None:
    right = PagedAttention.cached.fget
    assert right is not None
    patch.setattr(PagedAttention, "cached", property(lambda self: tuple(held.roll(1, 2) for held in right(self))))


def keys_of_another_group(patch: Patch) -> None:
    right = Beside._grouped_scores
    patch.setattr(Beside, "_grouped_scores", lambda self, q, k, mask: right(self, q, k.flip(0), mask))


@pytest.mark.parametrize(
    ("mistake", "spoilt"),
    [(pages_read_one_position_late, "attention_cached_keys"), (keys_of_another_group, "attention_scores")],
)
def test_a_mistake_shows(
    model: jf.Model, expected: list[jf.Result], mistake: Callable[[Patch], None], spoilt: str, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    found = run(model, PROMPTS[:1])[0]
    with pytest.raises(AssertionError, match=f"step 0, layer 0, {spoilt}: row"):
        compare(found, expected[0])


def backwards(m: jf.Model, t: Any) -> None:
    """Two heads look where they would not, on every step; what is sampled from is kept."""
    logits: list[Tensor] = []
    for _ in t.iter[:]:
        pattern = m.layers[1].attention_probabilities
        pattern[:, [1, 6], -1] = pattern[:, [1, 6], -1].flip(-1)
        m.layers[2].attention_head_outputs[:, -1, 3] *= -2.0
        logits.append(m.logits)
    t.save(logits=logits)


def test_an_edit_changes_the_tokens_alike(model: jf.Model, native: jf.Model, expected: list[jf.Result]) -> None:
    """Kills: an edit that is dropped, of another head, or of a row of another request."""
    found = run(model, PROMPTS, backwards)
    for prompt, got, plain in zip(PROMPTS, found, expected, strict=True):
        want = run(native, [prompt], backwards)[0]
        assert got.token_ids == want.token_ids != plain.token_ids
        for one, other in zip(got.saved["logits"], want.saved["logits"], strict=True):
            assert_close(one, other, "logits")
