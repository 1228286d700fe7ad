"""Decoding on transformers: a batch of rows through `generate`, each by its own sampling arguments.

transformers' own loop drives the model, its cache and its mask; what happens beside each forward pass is not known
here, only asked about, through `Control`. Two things of `generate` are kept out: the model's own defaults (many
checkpoints carry a temperature, a penalty or a length), and its guess that a prompt's pad tokens are padding. Where
one greedy token is asked of every row, its preparations are left out too (`prefill`).
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from jaxtyping import Int
from torch import BoolTensor, LongTensor, Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from jackfield.engines.progress import Progress
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Completion, FinishReason, Sampling
from jackfield.engines.transformers.loading import limits
from jackfield.engines.transformers.prefill import PromptCaches, greedy_tokens, prefills
from jackfield.engines.transformers.sampler import Choice, Place, RowSampler
from jackfield.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of one request, as it stands in a batch: an admitted prompt and sampling arguments with n=1."""

    prompt_token_ids: tuple[int, ...]
    sampling: Sampling

    def samples(self) -> list["Row"]:
        """The n rows of a request that asks for n completions."""
        return [Row(self.prompt_token_ids, sampling) for sampling in self.sampling.samples()]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the coming forward passes hold: the indices of `rows`, and how many columns of padding stand left of each.

    Row i of the model's batch is `rows[i]`; its token j is at column `pads[i] + j`.
    """

    rows: tuple[int, ...]
    pads: tuple[int, ...]


class Control(Protocol):
    """What decoding asks of whoever watches the forward passes."""

    def begin(self, layout: Layout) -> None:
        """Forward passes with this layout follow; asked once for each group of rows that runs together."""
        ...

    def finished(self, row: int) -> FinishReason | None:
        """Asked after every step, for each row that goes on: a reason to end it. The step's token is kept."""
        ...

    def ended(self, row: int) -> None:
        """Told once of each row that has its last token."""
        ...

    def should_abort(self) -> bool:
        """Asked after every step, when its rows were asked: whether to end those that go on, with "abort"."""
        ...


def decode(
    model: PreTrainedModel,
    tokenizer: Tokenizer | None,
    batch: Sequence[Row],
    control: Control | None = None,
    *,
    gradients: bool = False,
    caches: PromptCaches | None = None,
) -> list[Completion]:
    """Generates for every row; completions in the order of the rows.

    Rows run together, left-padded, as far as `together` allows. `gradients` keeps the forward passes in the graph;
    `caches` are those of the calls before.
    InvalidRequest for arguments that this engine cannot honour.
    """
    for row in batch:
        _check(row.sampling, tokenizer)
    eos_ids = end_of_sequence(model, tokenizer)
    progress = [Progress(row.prompt_token_ids, row.sampling, eos_ids, tokenizer) for row in batch]
    completions: dict[int, Completion] = {}
    for members in together(model, batch):
        group = _Group.of([batch[i] for i in members], [progress[i] for i in members], members)
        found = group.run(model, tokenizer, control, gradients, caches or PromptCaches())
        completions.update(zip(members, found, strict=True))
    return [completions[i] for i in range(len(batch))]


def _check(sampling: Sampling, tokenizer: Tokenizer | None) -> None:
    sampling.refuse(("prompt_logprobs", "spaces_between_special_tokens"), "transformers")
    for name in ("stop", "bad_words"):
        if tokenizer is None and getattr(sampling, name):
            raise InvalidRequest(f"{name} needs a tokenizer, and the model came without one: give it a tokenizer=.")


def end_of_sequence(model: PreTrainedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end a sequence: the model's (one, several or none) and the tokenizer's."""
    own: int | list[int] | None = getattr(model.generation_config, "eos_token_id", None)
    also: int | None = getattr(tokenizer, "eos_token_id", None)
    return frozenset(i for i in (*(own if isinstance(own, list) else [own]), also) if i is not None)


def together(model: PreTrainedModel, batch: Sequence[Row]) -> list[list[int]]:
    """The indices of `batch` in groups that can share forward passes with the result each row has alone.

    A row that has ended goes on as padding until its group has, one position further each step: the longest prompt
    and the most tokens of a group have to fit the context together.
    """
    if len(batch) == 1:
        return [[0]]
    context = limits(model.config).context
    groups: list[list[int]] = []
    prompt = new = 0
    for i, row in enumerate(batch):
        prompt, new = max(prompt, len(row.prompt_token_ids)), max(new, row.sampling.max_tokens)
        fits = context is None or prompt + new <= context
        if groups and fits and _mixes(model.config, batch[groups[-1][0]], row):
            groups[-1].append(i)
        else:
            groups.append([i])
            prompt, new = len(row.prompt_token_ids), row.sampling.max_tokens
    return groups


def _mixes(config: Any, one: Row, other: Row) -> bool:  # a configuration's attributes depend on its family
    """Whether neither row changes what the other computes.

    A rotary embedding stretched by the length of what passes (dynamic, longrope) is the longest row's, for all.
    llama4's temperature tuning (transformers 5.19) counts columns, padding included, so it takes equal lengths. So does
    an attention implementation registered without a mask function: its model makes no mask, and would see the padding.
    """
    text = config.get_text_config()
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    per_layer_type: list[dict[str, Any]] = [each for each in rope.values() if isinstance(each, dict)]
    if any(each.get("rope_type") in ("dynamic", "longrope") for each in (rope, *per_layer_type)):
        return False
    same_length = len(one.prompt_token_ids) == len(other.prompt_token_ids)
    masked = getattr(text, "_attn_implementation", None) in ALL_MASK_ATTENTION_FUNCTIONS
    return same_length or (masked and not getattr(text, "attn_temperature_tuning", False))


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that run together, their progress, and how they stand in the batch."""

    rows: list[Row]
    progress: list[Progress]
    layout: Layout
    width: int

    @classmethod
    def of(cls, rows: list[Row], progress: list[Progress], indices: Sequence[int]) -> "_Group":
        width = max(len(row.prompt_token_ids) for row in rows)
        pads = tuple(width - len(row.prompt_token_ids) for row in rows)
        return cls(rows, progress, Layout(tuple(indices), pads), width)

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None,
        control: Control | None,
        gradients: bool,
        caches: PromptCaches,
    ) -> list[Completion]:
        prefills_alone = not gradients and self._wants_one_likeliest and prefills(model)
        if control is not None:
            control.begin(self.layout)
        if prefills_alone:
            tokens = greedy_tokens(model, self._padded(model, tokenizer), self.layout.pads, caches)
            _RowEnds(self.layout.rows, self.progress, control).step(tokens)
            return [each.completion() for each in self.progress]
        choices = self._choices(tokenizer, model.device)
        processors = [RowSampler(choices, self.progress)] if choices else []
        ends = _RowEnds(self.layout.rows, self.progress, control)
        criteria = [] if self._alike(control) else [_RowCriteria(ends)]
        sequences = _generate(
            model,
            gradients,
            generation_config=self._config(model, tokenizer, stops=not criteria),
            logits_processor=LogitsProcessorList(processors),
            stopping_criteria=StoppingCriteriaList(criteria),
            **self._inputs(model, tokenizer),
        )
        self._catch_up(sequences[:, self.width :])
        wanted = [choices[i].logprobs(tokenizer) if i in choices else None for i in range(len(self.rows))]
        return [each.completion(logprobs) for each, logprobs in zip(self.progress, wanted, strict=True)]

    def _choices(self, tokenizer: Tokenizer | None, device: torch.device) -> dict[int, Choice]:
        return {
            i: Choice(self.progress[i], Place(self.layout.pads[i], len(row.prompt_token_ids)), tokenizer, device)
            for i, row in enumerate(self.rows)
            if not row.sampling.plain or row.sampling.logprobs is not None
        }

    @property
    def _wants_one_likeliest(self) -> bool:
        """Whether each row is one token, the likeliest."""
        samplings = [row.sampling for row in self.rows]
        return all(each.max_tokens == 1 and each.plain and each.logprobs is None for each in samplings)

    def _alike(self, control: Control | None) -> bool:
        """Whether `generate`'s own end, at one length or one set of stop ids for all, is every row's end."""
        if control is not None or any(row.sampling.stop or row.sampling.min_tokens for row in self.rows):
            return False
        ends = {(each.sampling.max_tokens, each.stop_ids) for each in self.progress}
        return len(ends) == 1

    def _config(self, model: PreTrainedModel, tokenizer: Tokenizer | None, *, stops: bool) -> GenerationConfig:
        stop_ids = sorted(self.progress[0].stop_ids) if stops else []
        return _OwnConfig(
            do_sample=False,
            use_cache=True,
            disable_compile=True,
            max_length=self.width + max(row.sampling.max_tokens for row in self.rows),
            eos_token_id=stop_ids or None,
            pad_token_id=_padding(model, tokenizer),
        )

    def _inputs(self, model: PreTrainedModel, tokenizer: Tokenizer | None) -> dict[str, Int[Tensor, "row token"]]:
        mask = [[0] * pads + [1] * (self.width - pads) for pads in self.layout.pads]
        # The mask is passed even where nothing is padded: without one, `generate` masks a prompt's own pad tokens.
        # Positions follow from it, in `generate`; where it is all ones it costs nothing.
        return {
            "input_ids": self._padded(model, tokenizer),
            "attention_mask": torch.tensor(mask, device=model.device),
        }

    def _padded(self, model: PreTrainedModel, tokenizer: Tokenizer | None) -> Int[Tensor, "row token"]:
        pad = _padding(model, tokenizer) if any(self.layout.pads) else 0
        padded = [[pad] * self.layout.pads[i] + list(row.prompt_token_ids) for i, row in enumerate(self.rows)]
        return torch.tensor(padded, device=model.device)

    def _catch_up(self, generated: Int[Tensor, "row token"]) -> None:
        """Pushes what no criterion has: all of it where `generate` ended by itself."""
        for each, token_ids in zip(self.progress, generated, strict=True):
            for token_id in _ints(token_ids)[len(each.token_ids) :]:
                if each.finish_reason is None:
                    each.push(token_id)


def _padding(model: PreTrainedModel, tokenizer: Tokenizer | None) -> int:
    """An id for padding, which is masked; the model's own, since some positions are counted by it, or 0."""
    for owner in (model.config.get_text_config(), tokenizer):
        pad = getattr(owner, "pad_token_id", None)
        if isinstance(pad, int) and 0 <= pad < limits(model.config).vocab_size:
            return pad
    return 0


def _generate(model: PreTrainedModel, gradients: bool, **arguments: Any) -> Int[Tensor, "row token"]:
    generate = cast("Any", type(model)).generate  # of GenerationMixin, which PreTrainedModel does not inherit
    if not gradients:
        return generate(model, **arguments)
    # It is wrapped in torch.no_grad: under that is the same function.
    with torch.enable_grad():
        return inspect.unwrap(generate)(model, **arguments)


class _OwnConfig(GenerationConfig):
    """A configuration that says everything itself.

    `generate` fills what a GenerationConfig leaves at None from the model's own, and None is the neutral value of many
    (suppressed tokens, forced tokens, stop strings, time). That call alone allows custom entries: it is left out.
    """

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        if allow_custom_entries:
            return {}
        return cast("dict[str, Any]", super().update(defaults_only=defaults_only, **kwargs))


class _RowEnds:
    """Ends each row by its own rules and by what its watcher says."""

    def __init__(self, rows: Sequence[int], progress: Sequence[Progress], control: Control | None) -> None:
        self._members = list(zip(rows, progress, strict=True))
        self._control = control

    def step(self, token_ids: Sequence[int]) -> list[bool]:
        """Takes the step's token of each row; which of them have ended."""
        going_on = [each.finish_reason is None for _, each in self._members]
        for (row, each), token_id in zip(self._members, token_ids, strict=True):
            if each.finish_reason is None:
                each.push(token_id, self._control.finished(row) if self._control else None)
        if self._control:
            self._tell(self._control, going_on)
        return [each.finish_reason is not None for _, each in self._members]

    def _tell(self, control: Control, going_on: Sequence[bool]) -> None:
        aborts = control.should_abort()
        for (row, each), went_on in zip(self._members, going_on, strict=True):
            if aborts and each.finish_reason is None:
                each.finish_reason = "abort"
            if went_on and each.finish_reason is not None:
                control.ended(row)


class _RowCriteria(StoppingCriteria):
    """The same, as `generate` asks for it."""

    def __init__(self, ends: _RowEnds) -> None:
        self._ends = ends

    def __call__(self, input_ids: LongTensor, scores: Any, **kwargs: Any) -> BoolTensor:
        ended = self._ends.step(_ints(input_ids[:, -1]))
        return cast("BoolTensor", torch.tensor(ended, device=input_ids.device))


def _ints(ids: Int[Tensor, " row"]) -> list[int]:
    return cast("list[int]", ids.tolist())
