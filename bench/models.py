"""The models that are measured, and their prompts. Needs only torch and transformers."""

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bench.jobs import LONG_TOKENS, OVERHEAD_LAYERS, OVERHEAD_TOKENS, OVERHEAD_WIDTH, PROMPT, PROMPT_TOKENS


class Models:
    """One process's models: the sample model out of `folder` for most jobs, a thin deep Llama for `overhead`.

    `plain` is for plain transformers alone. Libraries get a twin, which shares its weights and nothing else: what they
    leave in a model would otherwise slow down the baseline too, and not be seen.
    """

    def __init__(self, job: str, folder: Path) -> None:
        self.job, self._folder = job, folder

    @cached_property
    def plain(self) -> PreTrainedModel:
        return self._build("sdpa")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._folder)

    def twin(self, attention: str = "sdpa") -> PreTrainedModel:
        """Another model on the same weights; `attention` is transformers' `attn_implementation`."""
        twin = self._build(attention)
        twin.load_state_dict(self.plain.state_dict(), assign=True)
        return twin.eval().requires_grad_(False)

    @cached_property
    def ids(self) -> Tensor:
        """The prompt, [1, token]."""
        if self.job == "overhead":
            return torch.arange(1, 1 + OVERHEAD_TOKENS)[None]
        ids = self.tokenizer(PROMPT, return_tensors="pt").input_ids
        wanted = {"generation": ids.shape[1], "prompt": PROMPT_TOKENS, "long": LONG_TOKENS}[self.job]
        return ids.repeat(1, -(-wanted // ids.shape[1]))[:, :wanted]

    def _build(self, attention: str) -> PreTrainedModel:
        model = self._thin(attention) if self.job == "overhead" else self._sample(attention)
        return model.eval().requires_grad_(False)

    def _sample(self, attention: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32, attn_implementation=attention)

    @staticmethod
    def _thin(attention: str) -> PreTrainedModel:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=OVERHEAD_WIDTH,
            intermediate_size=4 * OVERHEAD_WIDTH,
            num_hidden_layers=OVERHEAD_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            attn_implementation=attention,
        )
        model = LlamaForCausalLM(config)
        model.generation_config.eos_token_id = None
        return model
