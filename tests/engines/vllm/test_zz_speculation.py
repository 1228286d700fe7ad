"""Speculation beside blocks. The last of these files to run: it has vLLM import numba, and after that vLLM 0.32 starts
no other engine in the same process (it reads `vars()` of every imported object, and llvmlite's have none)."""

import pytest

import jackfield as jf
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import prompt_of
from tests.engines.vllm.test_scheduler import steps

pytestmark = pytest.mark.slow


def test_speculation_is_refused_for_blocks_alone() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prompt = prompt_of(20, 1)
    with tiny.llama(num_gpu_blocks_override=40, speculative_config=speculative) as model:
        with pytest.raises(jf.InvalidRequest, match=r"No block can run .*: speculative_config"):
            model.run(prompt, steps)
        assert len(model.run(prompt, max_tokens=5, ignore_eos=True).token_ids) == 5
