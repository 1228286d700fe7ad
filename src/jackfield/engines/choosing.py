"""Choosing the tokens of a batch by each row's own sampling arguments, for engines that make no choice themselves."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from jackfield.engines.inline import InlineRun
from jackfield.engines.progress import Progress
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Logprob
from jackfield.engines.transformers.sampler import Choice, Place


class RowChooser:
    """The likeliest token of a row, or where its sampling arguments say otherwise what `Choice` makes of it."""

    def __init__(self, run: InlineRun, tokenizer: Tokenizer | None, device: torch.device) -> None:
        self._prompts, self._tokenizer, self._device = run.prompts, tokenizer, device
        self._choices = {
            sample: Choice(progress, Place(0, len(run.prompts[sample])), tokenizer, device)
            for sample, progress in enumerate(run.progress)
            if not progress.sampling.plain or progress.sampling.logprobs is not None
        }

    def __call__(self, logits: Float[Tensor, "batch vocab"], progress: Sequence[Progress]) -> list[int]:
        tokens = [int(token) for token in logits.argmax(-1)]
        for sample, choice in self._choices.items():
            if progress[sample].finish_reason is None:
                ids = [*self._prompts[sample], *progress[sample].token_ids]
                tokens[sample] = int(choice(torch.tensor([ids], device=self._device), logits[sample : sample + 1]))
        return tokens

    def logprobs(self, sample: int) -> list[dict[int, Logprob]] | None:
        choice = self._choices.get(sample)
        return None if choice is None else choice.logprobs(self._tokenizer)
