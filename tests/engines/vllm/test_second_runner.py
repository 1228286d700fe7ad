"""Values and edits under vLLM's second runner, which GPUs have, shown on a CPU."""

import os
import subprocess
import sys

import pytest

from tests.engines.vllm import tiny
from tests.engines.vllm.second_runner import ENVIRONMENT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("gemma2", 1), ("mistral", 1), ("llama", 2)])
def test_values_and_edits_are_transformers(family: str, ranks: int) -> None:
    """Kills: rows, positions or blocks that are found as the first runner has them."""
    tiny.need_vllm()
    command = [sys.executable, "-m", "tests.engines.vllm.second_runner", family, str(ranks)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-4000:]
