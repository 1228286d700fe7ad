"""A row that did not do what it is timed for is found out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.ours import DIRECTIONS, Ours
from bench.gpu.scales import CPU

PROMPTS = [[1] * CPU.prompt] * 2
ROWS = CPU.prompt + CPU.new - 1


@pytest.fixture
def ours() -> Ours:
    """The rows over no engine."""
    found = Ours.__new__(Ours)
    found.scale, found.site = CPU, "layers.2.layer_output"
    found.model = SimpleNamespace(num_layers=4, num_heads=4, hidden_size=64)  # type: ignore[assignment]
    return found


def result(new: int = CPU.new, saved: dict[str, Any] | None = None, returned: Any = None) -> SimpleNamespace:
    return SimpleNamespace(token_ids=[0] * new, saved=saved or {}, returned=returned)


def test_a_token_too_few(ours: Ours) -> None:
    ours.check("idle", PROMPTS, [result(), result()])
    with pytest.raises(ValueError, match=r"idle: \[6, 5\] tokens"):
        ours.check("idle", PROMPTS, [result(), result(new=5)])


def test_a_block_that_missed_a_step(ours: Ours) -> None:
    ours.check("block-each", PROMPTS, [result(returned=6)] * 2)
    with pytest.raises(ValueError, match="block-each: 5 came back, where it should have been 6"):
        ours.check("block-each", PROMPTS, [result(returned=5), result(returned=6)])


def test_one_block_in_the_batch(ours: Ours) -> None:
    ours.check("block-one", PROMPTS, [result(returned=6), result()])


def test_a_layer_that_was_not_probed(ours: Ours) -> None:
    kept = {f"layers.{layer}.layer_output": torch.zeros(ROWS, DIRECTIONS) for layer in range(4)}
    ours.check("probe", PROMPTS, [result(saved=kept)] * 2)
    del kept["layers.3.layer_output"]
    with pytest.raises(ValueError, match="probe: "):
        ours.check("probe", PROMPTS, [result(saved=kept)] * 2)


def test_a_capture_of_the_wrong_length(ours: Ours) -> None:
    ours.check("capture", PROMPTS, [result(saved={ours.site: torch.zeros(ROWS, 64)})] * 2)
    with pytest.raises(ValueError, match="capture: "):
        ours.check("capture", PROMPTS, [result(saved={ours.site: torch.zeros(ROWS - 1, 64)})] * 2)


def test_a_pattern_that_does_not_reach_the_last_key(ours: Ours) -> None:
    ours.check("pattern", PROMPTS[:1], [result(returned=(1, 4, 1, ROWS))])
    with pytest.raises(ValueError, match="pattern: "):
        ours.check("pattern", PROMPTS[:1], [result(returned=(1, 4, 1, ROWS - 1))])
