"""With which of vLLM's settings no block can run, because it would see rows that are not its request's, or not all."""

from typing import Any, Final

READABLE: Final = frozenset({"auto", "float16", "half", "bfloat16", "float", "float32"})


def untraceable(vllm_config: Any) -> str | None:
    """The setting that is in the way, by name, and why; None where there is none. Names are those of 0.25 to 0.33."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if vllm_config.speculative_config is not None:
        return "speculative_config computes tokens that may be taken back, and a block runs once per token"
    if getattr(parallel, "use_ubatching", parallel.enable_dbo):
        return "enable_dbo runs a batch as two that are interleaved"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)} spreads a request's keys over ranks"
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size={parallel.pipeline_parallel_size} spreads the layers over ranks"
    if parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        return "distributed_executor_backend='external_launcher' has a client on each rank, and a block comes from one"
    if cache.cache_dtype not in READABLE:
        return f"kv_cache_dtype={cache.cache_dtype!r} keeps keys in a form that is not read"
    return None
