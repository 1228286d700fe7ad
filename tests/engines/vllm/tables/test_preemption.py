"""Requests out of tables that lose their place in the cache.

Apart from other tests of tables: an engine that is closed ends the others of its process.
"""

from typing import Any

import pytest

import jackfield as jf
from tests.engines.vllm import tiny
from tests.engines.vllm.tables.test_company import numbers, same
from tests.engines.vllm.test_preemption import preempted


@pytest.mark.slow
def test_after_a_preemption_rows_are_kept_once_and_edited_again() -> None:
    """In a cache that does not hold all of them to their end."""
    model = tiny.llama(max_model_len=96, num_gpu_blocks_override=6, enable_prefix_caching=False)
    try:
        width = model.hidden_size
        own = [[jf.Steer("layers.0.layer_output", numbers(width, seed=seed)), jf.Capture("layers.*.mlp_output")]
               for seed in range(4)]  # fmt: skip
        prompts = [[*range(seed, seed + 28)] for seed in range(4)]
        arguments: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        alone = [model.generate(prompt, given, **arguments)[0] for prompt, given in zip(prompts, own, strict=True)]
        with preempted(model) as seen:
            together = model.generate(prompts, own, **arguments)
        assert seen
        for one, other in zip(together, alone, strict=True):
            same(one, other)
            assert one.saved["layers.0.mlp_output"].shape[0] == 28 + 39
    finally:
        model.close()
