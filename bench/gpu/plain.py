"""vLLM by itself: what everything is held against."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.scales import COMMON, Scale

Prompts = Sequence[list[int]]


class PlainVllm:
    """A `vllm.LLM`, as anybody starts one. `options` go over the scale's."""

    def __init__(self, folder: str, scale: Scale, **options: Any) -> None:
        from vllm import LLM

        self._new = scale.new
        self.llm: Any = LLM(model=folder, **{**COMMON, **scale.options, **options})

    def generate(self, prompts: Prompts, extra: Mapping[str, Any] | None = None) -> int:
        """Runs a batch; how many tokens it made. `extra` is what a plugin's requests bring."""
        ready: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [sampling(self._new, extra_args=None if extra is None else dict(extra)) for _ in ready]
        outputs = self.llm.generate(ready, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def sampling(new: int, **more: Any) -> Any:
    """Greedy, so many tokens and never fewer, and none of them turned into text."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, **more)
