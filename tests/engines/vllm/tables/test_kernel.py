"""The kernel against its double, under Triton's interpreter: on a GPU the same program runs it compiled."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jackfield.engines.vllm.tables.ops import Kind

ROOT = Path(__file__).parents[4]


@cache
def cases(spoiled: str = "") -> list[dict[str, Any]]:
    """What the program says of random recipes, or of ones whose table was spoiled."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with vLLM")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.engines.vllm.tables.kernel_against_double", "cpu", "3", spoiled]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_the_kernel_does_what_its_double_does() -> None:
    for case in cases():
        # The interpreter cuts off what does not go into bfloat16, where a GPU rounds.
        assert case["apart"] < (1e-6 if case["dtype"] == "torch.float32" else 2**-6), case
        assert case["edited"] > 0


@pytest.mark.slow
def test_every_kind_is_among_the_cases() -> None:
    assert {kind for case in cases() for kind in case["kinds"]} == {kind.name for kind in Kind}


@pytest.mark.slow
@pytest.mark.parametrize("field", ["scale", "bank", "column", "summed"])
def test_a_table_that_says_something_else_is_found_out(field: str) -> None:
    assert max(case["apart"] for case in cases(field) if case["dtype"] == "torch.float32") > 1e-3


@pytest.mark.slow
def test_the_kernels_kinds_are_numbered_as_operations_are() -> None:
    pytest.importorskip("triton")
    from jackfield.engines.vllm.tables import kernel

    assert {kind.name: kind.value for kind in Kind} == {kind.name: getattr(kernel, kind.name).value for kind in Kind}
