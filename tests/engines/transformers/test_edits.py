"""Every value that can be written: an edit changes what the model says exactly as the same edit by a raw hook does."""

from typing import Any

import pytest
import torch
from torch import Tensor

import jackfield as jf
from tests import zoo
from tests.engines.transformers.reading import loaded, pairs, references
from tests.reference.edits import OF_THE_MODEL, WRITABLE, edited_tokens

pytestmark = pytest.mark.slow

FAMILIES = (
    "llama",
    "gpt2",
    "gemma2",
    "mixtral",
    "gpt_oss",
    "granite",
    "bloom",
    "olmo2",
    "qwen3_next",
    "falcon/40b",
    "gptj",
    "phi",
)
LAYER = {"qwen3_next": 3}
LENGTH, STEPS = 11, 4


def twist(x: Tensor) -> Tensor:
    """An edit that no symmetry hides: every entry of the last row changes, each differently."""
    twisted = x.clone()
    ramp = torch.linspace(-1.0, 2.0, x[..., -1:, :].numel()).view_as(x[..., -1:, :])
    twisted[..., -1:, :] = x[..., -1:, :] * ramp
    return twisted


def twist_heads(x: Tensor) -> Tensor:
    """The same for [1, token, head, width], whose rows are not the last axis but one."""
    twisted = x.clone()
    twisted[:, -1] = x[:, -1] * torch.linspace(-1.0, 2.0, x[:, -1].numel()).view_as(x[:, -1])
    return twisted


def edit_of(value: str) -> Any:
    return twist_heads if value in ("attention_head_outputs", "attention_premix") else twist


def cases() -> list[tuple[str, str]]:
    return [(name, value) for name in FAMILIES for value in WRITABLE]


def part_of(model: jf.Model, name: str, value: str) -> Any:
    return model if value in OF_THE_MODEL else model.layers[LAYER.get(name, 1)]


@pytest.mark.parametrize(("name", "value"), cases(), ids=[f"{name}: {value}" for name, value in cases()])
def test_an_edit_does_what_a_raw_hook_does(name: str, value: str) -> None:
    model, edit = loaded(name), edit_of(value)
    layer = None if value in OF_THE_MODEL else LAYER.get(name, 1)
    reason = model.support(layer)[value]
    ids = zoo.prompt(name, LENGTH, seed=3)
    if reason is not None:
        assert not any(key == (layer, value) for key, _ in pairs(references(name)[0][0])), reason
        pytest.skip(reason)
    try:
        want = edited_tokens(zoo.build(name), name, ids, value, layer, edit, STEPS)
    except ValueError as error:
        pytest.skip(str(error))

    def block(m: jf.Model, t: Any) -> None:
        logits = []
        for _ in t.iter[:]:
            part = part_of(m, name, value)
            setattr(part, value, edit(getattr(part, value)))
            logits.append(m.logits)
        t.save(logits=logits)

    result = model.run(ids[0].tolist(), block, max_tokens=STEPS, ignore_eos=True)
    got = torch.cat([row[0] for row in result.saved["logits"]])
    assert result.token_ids == want.token_ids
    assert float((got - want.logits).abs().max() / want.logits.abs().max()) < 1e-4
    assert not got.equal(plain_logits(name)), "the edit changed nothing, so the test shows nothing"


def plain_logits(name: str) -> Tensor:
    def block(m: jf.Model, t: Any) -> None:
        t.save(logits=[m.logits for _ in t.iter[:]])

    result = loaded(name).run(zoo.prompt(name, LENGTH, seed=3)[0].tolist(), block, max_tokens=STEPS, ignore_eos=True)
    return torch.cat([row[0] for row in result.saved["logits"]])


@pytest.mark.parametrize("value", WRITABLE)
def test_in_place_assigned_and_written_by_rows_are_one_edit(value: str) -> None:
    """On mixtral, which has them all but neurons; the neurons on llama."""
    name = "llama" if value == "mlp_activations" else "mixtral"
    model, ids = loaded(name), zoo.prompt(name, LENGTH, seed=3)[0].tolist()

    def in_place(m: jf.Model, t: Any) -> None:
        x = getattr(part_of(m, name, value), value)
        x.copy_(edit_of(value)(x))
        t.save(logits=m.logits.clone())

    def assigned(m: jf.Model, t: Any) -> None:
        part = part_of(m, name, value)
        setattr(part, value, edit_of(value)(getattr(part, value)))
        t.save(logits=m.logits)

    def written(m: jf.Model, t: Any) -> None:
        part = part_of(m, name, value)
        part.write(value, edit_of(value)(part.read(value, queries=[-1])), queries=[-1])
        t.save(logits=m.logits)

    blocks = [in_place, assigned] if value == "logits" else [in_place, assigned, written]
    logits = [model.run(ids, block, max_tokens=1).saved["logits"] for block in blocks]
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "value", [name for name in WRITABLE if name not in ("attention_scores", "attention_probabilities")]
)
def test_an_edit_that_changes_nothing_changes_no_bit(value: str) -> None:
    name = "llama" if value == "mlp_activations" else "mixtral"

    def block(m: jf.Model, t: Any) -> None:
        logits = []
        for _ in t.iter[:]:
            x = getattr(part_of(m, name, value), value)
            x += 0
            logits.append(m.logits)
        t.save(logits=logits)

    model, ids = loaded(name), zoo.prompt(name, LENGTH, seed=3)[0].tolist()
    got = model.run(ids, block, max_tokens=STEPS, ignore_eos=True).saved["logits"]
    assert torch.cat([row[0] for row in got]).equal(plain_logits(name))
