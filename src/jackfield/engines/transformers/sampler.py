"""Choosing tokens row by row: each row of a batch has sampling arguments, and random numbers, of its own.

transformers warps and draws for a batch as a whole, so a row's token would depend on its neighbours. `RowSampler`
works each row's logits with transformers' own processors, in vLLM's order, chooses, and leaves nothing but the chosen
token for `generate`'s argmax to find. A batch equals its members alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import FloatTensor, LongTensor, Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jackfield.engines.progress import Progress
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Logprob, Sampling

Ids: TypeAlias = Int[Tensor, "1 token"]
Scores: TypeAlias = Float[Tensor, "1 vocab"]
# (ids, scores) to scores. Any: transformers annotates its processors with torch's legacy LongTensor and FloatTensor.
Step: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands in a left-padded batch: behind `pad` columns, with a prompt of `length` tokens."""

    pad: int
    length: int


class RowSampler(LogitsProcessor):
    """Chooses the tokens of the rows that are not plain argmax, or whose log probabilities are wanted."""

    def __init__(self, rows: dict[int, "Choice"], progress: Sequence[Progress]) -> None:
        self._rows = rows
        self._progress = progress

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """The scores [row, vocab]: a row that chose has its token alone above -inf. In place: they are a copy."""
        free = scores.detach()
        for row, choice in self._rows.items():
            if self._progress[row].finish_reason is None:
                token = choice(input_ids[row : row + 1], free[row : row + 1])
                free[row].fill_(-torch.inf).scatter_(0, token, 0.0)
        return cast("FloatTensor", free)


class Choice:
    """One row's way from logits to a token, with its generator and what it notes of log probabilities."""

    def __init__(self, progress: Progress, place: Place, tokenizer: Tokenizer | None, device: torch.device) -> None:
        sampling = progress.sampling
        self._pad = place.pad
        self._steps = [*_shifts(progress, place.length, tokenizer, device), *_warps(sampling)]
        self._generator = None if sampling.greedy else _generator(sampling.seed, device)
        self._count = sampling.logprobs
        self._noted: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, ids: Ids, logits: Scores) -> Int[Tensor, " 1"]:
        """The token for this row, [1]; `ids` [1, pads + tokens so far]."""
        scores = logits.clone()
        for step in self._steps:
            scores = step(ids[:, self._pad :], scores)
        token = scores.argmax(-1) if self._generator is None else _draw(scores, self._generator)
        if self._count is not None:
            self._note(logits, token, self._count)
        return token

    def _note(self, logits: Scores, token: Int[Tensor, " 1"], count: int) -> None:
        logprobs = logits.log_softmax(-1)[0]
        own = logprobs[token]
        top = logprobs.topk(logprobs.shape[0] if count == -1 else min(count, logprobs.shape[0]))
        ranks = torch.arange(1, top.indices.shape[0] + 1, device=token.device)
        own_rank = (logprobs >= own).sum().view(1)
        ids = torch.cat([token, top.indices])
        self._noted.append((ids, torch.cat([own, top.values]), torch.cat([own_rank, ranks])))

    def logprobs(self, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]] | None:
        """Per generated token: the one chosen, then the likeliest, as vLLM lists them. None if not asked for."""
        if self._count is None:
            return None
        return [_named(noted, tokenizer) for noted in self._noted]


def _named(noted: tuple[Tensor, Tensor, Tensor], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    named: dict[int, Logprob] = {}
    for token, logprob, rank in zip(*(cast("list[Any]", each.tolist()) for each in noted), strict=True):
        word = tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None
        named.setdefault(token, Logprob(logprob, rank, word))
    return named


def _generator(seed: int | None, device: torch.device) -> torch.Generator:
    """This row's own. Without a seed it takes one from torch's global generator, so `torch.manual_seed` still holds."""
    drawn = int(torch.randint(2**63 - 1, ())) if seed is None else seed
    return torch.Generator(device).manual_seed(drawn)


def _draw(scores: Scores, generator: torch.Generator) -> Int[Tensor, " 1"]:
    """A token drawn from softmax(scores), by the exponential race: argmax of p / e, e ~ Exp(1).

    Not `torch.multinomial`, which on a GPU ends the process's CUDA context when an edited logit is NaN.
    """
    race = torch.empty_like(scores).exponential_(generator=generator)
    return scores.softmax(-1).div_(race).argmax(-1)


def _shifts(progress: Progress, prompt_length: int, tokenizer: Tokenizer | None, device: torch.device) -> list[Step]:
    """What acts on greedy rows too, in vLLM's order: masks, then biases, then penalties."""
    sampling = progress.sampling
    steps: list[Step] = []
    if sampling.allowed_token_ids is not None:
        steps.append(_allowed(sampling.allowed_token_ids))
    if sampling.bad_words:
        steps.append(_generated(NoBadWordsLogitsProcessor(bad_words_ids(sampling.bad_words, tokenizer)), prompt_length))
    if sampling.min_tokens and progress.stop_ids:
        stop_ids = sorted(progress.stop_ids)
        steps.append(MinNewTokensLengthLogitsProcessor(prompt_length, sampling.min_tokens, stop_ids, str(device)))
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        steps.append(_generated(_count_penalty(sampling), prompt_length))
    return steps


def _warps(sampling: Sampling) -> list[Step]:
    """What shapes the distribution of a sampled row, in vLLM's order."""
    if sampling.greedy:
        return []
    steps: list[Step] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    return steps


def _generated(step: Step, prompt_length: int) -> Step:
    """`step`, given the generated ids alone."""
    return lambda ids, scores: step(ids[:, prompt_length:], scores)


def _allowed(token_ids: Sequence[int]) -> Step:
    def step(ids: Ids, scores: Scores) -> Scores:
        kept = torch.tensor(token_ids, device=scores.device)
        return torch.full_like(scores, -torch.inf).index_copy(1, kept, scores[:, kept])

    return step


def _count_penalty(sampling: Sampling) -> Step:
    """Frequency and presence penalties, over the generated ids, as OpenAI and vLLM define them."""

    def step(ids: Ids, scores: Scores) -> Scores:
        counts = torch.bincount(ids[0], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)

    return step


def bad_words_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """The token sequences of `words`, at the beginning of a text and, where that is another token, inside one."""
    assert tokenizer is not None  # checked when the batch was made
    found: list[list[int]] = []
    for word in words:
        first = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        inside = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        found.append(first)
        if len(inside) == len(first) and inside[0] != first[0]:
            found.append(inside)
    return found
