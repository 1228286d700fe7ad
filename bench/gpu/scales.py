"""How long prompts are, how wide the model is, and vLLM's options: on a GPU, whose figures count, and on a CPU."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

GIB: Final = 2**30
# Compiled code and engine in this process; and no library asks the network.
VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Load:
    """A long mixed load: lengths are drawn evenly between two ends, and requests come at `rate` a second on average."""

    requests: int
    rate: float
    prompt: tuple[int, int]
    new: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scale:
    """Everything that a machine's size decides. `shape` is what goes into the model's configuration."""

    name: str
    batches: tuple[int, ...]
    prompt: int
    long_prompt: int
    new: int
    load: Load
    shape: Mapping[str, int]
    options: Mapping[str, Any]
    variables: Mapping[str, str]


GPU: Final = Scale(
    name="gpu",
    batches=(1, 64, 256),
    prompt=128,
    long_prompt=8192,
    new=64,
    load=Load(requests=256, rate=16.0, prompt=(16, 2048), new=(16, 256)),
    shape={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    # A traced prompt runs in one pass: the longest one has to fit. The cache's size is given, so that what is left of
    # the device says what else was taken.
    options={
        "dtype": "bfloat16",
        "max_model_len": 9216,
        "max_num_batched_tokens": 9216,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 16 * GIB,
    },
    variables=VARIABLES,
)
CPU: Final = Scale(
    name="cpu",
    batches=(1, 4),
    prompt=12,
    long_prompt=96,
    new=6,
    load=Load(requests=16, rate=50.0, prompt=(4, 64), new=(2, 8)),
    shape={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
    },
    options={
        "dtype": "float32",
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "block_size": 32,
    },
    variables={**VARIABLES, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
)
SCALES: Final = {scale.name: scale for scale in (GPU, CPU)}
# The same for all: weights are random numbers, requests end by their length, and nobody has a tokenizer.
COMMON: Final[Mapping[str, Any]] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
}


def variables(scale: Scale, who: str, *paths: Path) -> dict[str, str]:
    """The environment of one process. Each has a cache of compiled code of its own: what they compile differs."""
    cache = Path.home() / ".cache" / "jackfield-bench" / who.replace(" ", "-")
    found = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    return {**scale.variables, "VLLM_CACHE_ROOT": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, found))}


def make_model(folder: Path, scale: Scale) -> Path:
    """Writes a Qwen3 of this scale's size: its configuration, which random weights need no more than, and a tokenizer
    of one word, which nnsight looks for.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    config = Qwen3Config(**scale.shape, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"])
    config.dtype = scale.options["dtype"]
    config.save_pretrained(folder)
    words = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="word").save_pretrained(folder)
    return folder


def shape_of(folder: str | Path) -> dict[str, Any]:
    """The numbers of a model's configuration."""
    return json.loads((Path(folder) / "config.json").read_text())
