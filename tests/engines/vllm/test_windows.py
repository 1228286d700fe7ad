"""A window that lets go of positions: what the cache still holds, what it does not, and that the pattern is right."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from tests import zoo
from tests.engines.vllm.families import Family, Running, running
from tests.reference.compare import assert_close
from tests.reference.record import record

pytestmark = pytest.mark.slow

WINDOW, BLOCK = 8, 32
LENGTH = 60  # more than a block and a window: the first block goes when the window has left it
STEPS = 12


@pytest.fixture(scope="module")
def mistral() -> Generator[Running]:
    with running(Family("mistral"), max_model_len=128) as found:
        yield found


def test_dropped_positions_are_nan_in_the_cache_and_zero_in_the_pattern(mistral: Running) -> None:
    """Kills: a block that has been let go of, and may be another request's, read as this one's."""
    ids = zoo.prompt("mistral", LENGTH, seed=1)
    want = record(mistral.hf, "mistral", ids, STEPS)
    got = mistral.model.run(ids[0].tolist(), _cached, max_tokens=STEPS, ignore_eos=True).saved["rows"]
    dropped = 0
    for (keys, pattern), step in zip(got, want, strict=True):
        so_far = torch.cat([each.layers[1]["attention_keys"] for each in want[: step.index + 1]], 2)
        gone = keys.isnan().all(-1)[0, 0]
        dropped = max(dropped, int(gone.sum()))
        assert not gone[-WINDOW:].any()
        assert_close(keys[:, :, ~gone], so_far[:, :, ~gone], "attention_cached_keys")
        assert not pattern[..., gone].any()
        assert_close(pattern, step.layers[1]["attention_probabilities"], "attention_probabilities")
    assert dropped in (0, BLOCK), "a window lets go of whole blocks"
    assert dropped, "no position was dropped, so the test shows nothing"


def _cached(model: Any, t: Any) -> None:
    rows = []
    for _ in t.iter[:]:
        layer = model.layers[1]
        rows.append((layer.attention_cached_keys, layer.attention_probabilities))
    t.save(rows=rows)
