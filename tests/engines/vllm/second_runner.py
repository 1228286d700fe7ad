"""vLLM's second runner on a CPU: its kernels, which are Triton's, by Triton's interpreter. In a process of its own.

    python -m tests.engines.vllm.second_runner FAMILY RANKS

with ENVIRONMENT set before Python starts. Ends with 0 where values and edits are transformers'.
"""

import sys
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import torch

from tests.engines.vllm.tiny import ENVIRONMENT as OF_VLLM

ENVIRONMENT: Final = MappingProxyType(
    {
        **OF_VLLM,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "TORCH_COMPILE_DISABLE": "1",  # inductor would ask the driver for a compiler
        "OMP_NUM_THREADS": "1",  # ranks are forked
    }
)


class _Driver:
    """Enough of a Triton driver for kernels that are interpreted."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_benchmarker(self) -> None:
        return None

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cpu", 0, 0)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Backend:
    driver, compiler = _Driver, None


def interpret() -> None:
    """Gives Triton a driver for the CPU; vLLM then takes it for installed."""
    import_module("triton.backends").backends["cpu"] = _Backend
    import_module("triton.runtime.driver").driver.set_active(_Driver())


def main(family: str, ranks: str) -> None:
    """Values alone and in company, then edits, of one family."""
    interpret()
    families: Any = import_module("tests.engines.vllm.families")
    parity: Any = import_module("tests.engines.vllm.test_parity")
    parallel: Any = import_module("tests.engines.vllm.test_tensor_parallel")
    found = next(each for each in families.FAMILIES if each.zoo == family)
    options = {"tensor_parallel_size": int(ranks), "distributed_executor_backend": "uni" if ranks == "1" else "mp"}
    with parallel.forked(), families.running(found, **options) as engine:
        if ranks == "1":
            runner = engine.model._engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
            assert "vllm.v1.worker.gpu.model_runner" in {base.__module__ for base in type(runner).__mro__}
        engine.compare_alone()
        engine.compare_company()
        parity.test_edits_do_what_raw_hooks_do(engine)
        parity.test_reading_everything_changes_no_bit(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
