"""Settings of vLLM's with which no block can run: refused by name. vLLM itself is not needed to say so."""

from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.engines.vllm.untraceable import untraceable


def config(speculative: Any = None, cache_dtype: str = "auto", **parallel: Any) -> Any:
    usual = {
        "use_ubatching": False,
        "enable_dbo": False,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "mp",
    }
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(**(usual | parallel)),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_the_usual_settings_are_no_obstacle(dtype: str) -> None:
    assert untraceable(config(cache_dtype=dtype)) is None


def test_several_ranks_are_no_obstacle() -> None:
    assert untraceable(config(tensor_parallel_size=2)) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (config(speculative=object()), "speculative_config"),
        (config(use_ubatching=True), "enable_dbo"),
        (config(decode_context_parallel_size=2), "decode_context_parallel_size=2"),
        (config(prefill_context_parallel_size=4), "prefill_context_parallel_size=4"),
        (config(pipeline_parallel_size=2), "pipeline_parallel_size=2"),
        (config(tensor_parallel_size=2, distributed_executor_backend="external_launcher"), "external_launcher"),
        (config(cache_dtype="fp8"), "kv_cache_dtype='fp8'"),
        (config(cache_dtype="fp8_ds_mla"), "kv_cache_dtype='fp8_ds_mla'"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_each_other_is_named(given: Any, named: str) -> None:
    assert named in str(untraceable(given))
