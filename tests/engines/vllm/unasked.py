"""A vLLM that nobody asked jackfield into. Run as a script, `python unasked.py FOLDER`, it prints JSON.

Which plugins there are for it, which of jackfield's modules it has imported, and what it answers.
"""

import importlib.metadata
import json
import sys
from typing import Any

PROMPTS = [[3 + (7 * i * i + length) % 120 for i in range(length)] for length in (12, 7, 20)]


def started(folder: str, **options: Any) -> Any:
    """A `vllm.LLM` as anybody starts one."""
    from vllm import LLM

    return LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        max_model_len=64,
        num_gpu_blocks_override=40,
        block_size=32,
        skip_tokenizer_init=True,
        **options,
    )


def answers(llm: Any, **given: Any) -> list[list[int]]:
    """The tokens of a batch."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, **given)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def main(folder: str) -> None:
    llm = started(folder)
    plugins = [entry.value for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]
    tokens = answers(llm)
    modules = sorted(name for name in sys.modules if name.partition(".")[0] == "jackfield")
    additional = dict(llm.llm_engine.vllm_config.additional_config)
    print(json.dumps({"plugins": plugins, "modules": modules, "tokens": tokens, "additional": additional}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
