"""What a caller asks of an engine beside the prompt, and what comes back: sampling arguments, limits, completions.

Outside input is parsed once, into types that everything behind trusts: `Sampling.parse` reads the arguments (prompt.py
the prompts) and `admit` holds both against what the model can take. Nothing here runs a model or knows an engine.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

from jackfield.errors import InvalidRequest, RequestTooLong, near

T = TypeVar("T")

FinishReason: TypeAlias = Literal["stop", "length", "stopped", "abort", "error"]

GREEDY_BELOW: Final = 1e-5  # the temperature under which vLLM takes the likeliest token
RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_new_tokens": "write max_tokens",
        "max_length": "write max_tokens, which counts the new tokens alone",
        "max_completion_tokens": "write max_tokens",
        "min_new_tokens": "write min_tokens",
        "min_length": "write min_tokens, which counts the new tokens alone",
        "do_sample": "temperature decides: 0.0 takes the likeliest token, more than that samples",
        "num_return_sequences": "write n",
        "best_of": "write n, and choose among the completions",
        "num_beams": "there is no beam search; write n with a temperature above 0",
        "stop_strings": "write stop",
        "stop_sequences": "write stop",
        "eos_token_id": "write stop_token_ids, with ignore_eos=True to drop the model's own",
        "bad_words_ids": "write bad_words, or logit_bias for single tokens",
        "suppress_tokens": "write logit_bias",
        "generator": "write seed",
        "top_logprobs": "write logprobs",
        "output_scores": "write logprobs",
        "logits_processor": "edit `logits` in the block",
    }
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one sampling argument is read: what it has to be, in words, and a reader that raises ValueError."""

    wants: str
    read: Callable[[object], object]


def real(wants: str, accepts: Callable[[float], bool]) -> Rule:
    """A finite number that `accepts` takes; a bool is none."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError
        number = float(value)
        if not math.isfinite(number) or not accepts(number):
            raise ValueError
        return number

    return Rule(wants, read)


def whole(wants: str, accepts: Callable[[int], bool]) -> Rule:
    """An integer that `accepts` takes; neither a bool nor 3.0 is one."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not accepts(int(value)):
            raise ValueError
        return int(value)

    return Rule(wants, read)


def optional(rule: Rule) -> Rule:
    """What `rule` takes, or None."""
    return Rule(f"{rule.wants}, or None", lambda value: None if value is None else rule.read(value))


def several(item: Rule) -> Rule:
    """A list, tuple or set of what `item` takes; kept as a tuple."""

    def read(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple | set | frozenset):
            raise ValueError
        return tuple(item.read(each) for each in cast("Sequence[object]", value))

    return Rule(f"a list of which each is {item.wants}", read)


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _read_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _read_stop(value: object) -> object:
    return STRINGS.read([value] if isinstance(value, str) else () if value is None else value)


def _read_biases(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError
    pairs = cast("Mapping[object, object]", value).items()
    # vLLM takes a token id as a string too, as JSON has it.
    return cast(
        "Mapping[int, float]",
        {TOKEN.read(int(k) if isinstance(k, str) else k): BIAS.read(bias) for k, bias in pairs},
    )


TOKEN: Final = whole("a token id", lambda x: x >= 0)
BIAS: Final = real("a number", lambda _: True)
FLAG: Final = Rule("True or False", _read_flag)
STRINGS: Final = several(Rule("a string that is not empty", _read_text))
PENALTY: Final = real("a number from -2 to 2", lambda x: -2 <= x <= 2)
COUNT: Final = whole("a whole number, 1 or more", lambda x: x >= 1)
LOGPROBS: Final = optional(whole("a whole number, 0 or more, or -1 for the whole vocabulary", lambda x: x >= -1))


def _argument(default: T, rule: Rule) -> T:
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to end: vLLM's `SamplingParams`, by its names, with a trace's defaults.

    Made by `Sampling.parse`, which checks. `logprobs=k` gives, per generated token, the sampled token and the k
    likeliest, in nats, out of the model's own distribution, before anything here changes it.
    """

    n: int = _argument(1, COUNT)
    max_tokens: int = _argument(1, COUNT)
    min_tokens: int = _argument(0, whole("a whole number, 0 or more", lambda x: x >= 0))
    temperature: float = _argument(0.0, real("a number, 0 or more", lambda x: x >= 0))
    top_p: float = _argument(1.0, real("a number above 0, at most 1", lambda x: 0 < x <= 1))
    top_k: int = _argument(0, whole("a whole number, 1 or more, or 0 or -1 for all tokens", lambda x: x >= -1))
    min_p: float = _argument(0.0, real("a number from 0 to 1", lambda x: 0 <= x <= 1))
    presence_penalty: float = _argument(0.0, PENALTY)
    frequency_penalty: float = _argument(0.0, PENALTY)
    repetition_penalty: float = _argument(1.0, real("a number above 0", lambda x: x > 0))
    seed: int | None = _argument(None, optional(whole("a whole number of 64 bits", lambda x: -(2**63) <= x < 2**63)))
    stop: tuple[str, ...] = _argument((), Rule("a string, or a list of strings, none empty", _read_stop))
    stop_token_ids: tuple[int, ...] = _argument((), several(TOKEN))
    ignore_eos: bool = _argument(False, FLAG)
    include_stop_str_in_output: bool = _argument(False, FLAG)
    bad_words: tuple[str, ...] = _argument((), STRINGS)
    logit_bias: Mapping[int, float] | None = _argument(None, optional(Rule("a dict {token id: bias}", _read_biases)))
    allowed_token_ids: tuple[int, ...] | None = _argument(None, optional(several(TOKEN)))
    logprobs: int | None = _argument(None, LOGPROBS)
    prompt_logprobs: int | None = _argument(None, LOGPROBS)
    detokenize: bool = _argument(True, FLAG)
    skip_special_tokens: bool = _argument(True, FLAG)
    spaces_between_special_tokens: bool = _argument(True, FLAG)

    @classmethod
    def parse(cls, **arguments: object) -> "Sampling":
        r"""Reads sampling arguments; InvalidRequest names one that is unknown, of the wrong type or out of range.

        >>> Sampling.parse(max_tokens=4, stop="\n").stop
        ('\n',)
        """
        rules = _rules()
        for name in arguments:
            if name not in rules:
                raise InvalidRequest(_unknown(name, rules))
        sampling = cls(**{name: _read(name, rules[name], value) for name, value in arguments.items()})
        sampling._check()
        return sampling

    def _check(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}.")
        if self.greedy and self.n > 1:
            raise InvalidRequest(f"n={self.n} with temperature=0.0 would be one completion {self.n} times: raise it.")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings are found in the text: they need detokenize=True.")
        if self.allowed_token_ids == ():
            raise InvalidRequest("allowed_token_ids=[] leaves no token to choose; None allows all.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Whether the token is the argmax of the model's own logits: nothing is drawn, nothing shifts them."""
        shifts = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0, self.min_tokens)
        masks = (self.bad_words, self.logit_bias, self.allowed_token_ids)
        return self.greedy and not any(shifts) and not any(masks)

    def samples(self) -> tuple["Sampling", ...]:
        """The n samples of this request, each with n=1 and, where there is a seed, its own: seed, seed + 1, ..."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return tuple(replace(self, n=1, seed=seed) for seed in seeds)

    def refuse(self, names: Sequence[str], engine: str) -> None:
        """InvalidRequest if one of `names` was set: what this engine cannot honour is refused by name."""
        for name in names:
            if getattr(self, name) != getattr(Sampling, name):  # where a dataclass keeps its defaults
                raise InvalidRequest(f"{name}={getattr(self, name)!r}: the {engine} engine cannot honour it.")


@lru_cache(maxsize=1)
def _rules() -> Mapping[str, Rule]:
    return MappingProxyType({each.name: cast("Rule", each.metadata["rule"]) for each in fields(Sampling)})


def _unknown(name: str, known: Mapping[str, Rule]) -> str:
    if name in RENAMED:
        return f"{name} is no sampling argument here: {RENAMED[name]}."
    return f"{name} is no sampling argument.{near(name, known)} The names are vLLM's: {', '.join(known)}."


def _read(name: str, rule: Rule, value: object) -> Any:  # the type depends on the name
    try:
        return rule.read(value)
    except ValueError:
        raise InvalidRequest(f"{name}={value!r}: it has to be {rule.wants}.") from None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability in nats, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine made of one prompt.

    `token_ids` are the generated ones, the one that ended it included; `text` is theirs, without an ending stop
    token or stop string, and empty without a tokenizer. `logprobs` has one dict {token id: Logprob} per token.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model can take: ids below `vocab_size`, and `context` tokens (None: any number), which `setting` says."""

    vocab_size: int
    context: int | None
    setting: str


def admit(prompt_token_ids: Sequence[int], sampling: Sampling, limits: Limits) -> None:
    """InvalidRequest for a prompt or a sampling argument outside the vocabulary, RequestTooLong past the context."""
    if not prompt_token_ids:
        raise InvalidRequest("The prompt has no tokens: give at least one, for example the tokenizer's bos_token_id.")
    _check_vocabulary("the prompt", prompt_token_ids, limits)
    _check_vocabulary("logit_bias", list(sampling.logit_bias or ()), limits)
    _check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or (), limits)
    total = len(prompt_token_ids) + sampling.max_tokens
    if limits.context is not None and total > limits.context:
        raise RequestTooLong(
            f"{len(prompt_token_ids)} prompt tokens and max_tokens={sampling.max_tokens} make {total}, but the model "
            f"holds {limits.context} ({limits.setting}): shorten the prompt or lower max_tokens."
        )


def _check_vocabulary(place: str, ids: Sequence[int], limits: Limits) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        token = next(each for each in ids if not 0 <= each < limits.vocab_size)
        raise InvalidRequest(f"Token id {token} in {place}: the vocabulary is 0 to {limits.vocab_size - 1}.")
