"""Prompts and blocks in, results out: what `Model.run`, `Model.trace` and `t.invoke` have in common."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from jackfield.engines.engine import Engine, Outcome, Request
from jackfield.engines.prompt import Many, One, Prompt, Stream, parse_prompt, parse_prompts, tokenize
from jackfield.engines.request import Sampling
from jackfield.errors import InvalidRequest, TracingError, Unavailable
from jackfield.trace.binding import bind
from jackfield.trace.capture import Block, Body
from jackfield.trace.result import Result, letting_go, without_traceback
from jackfield.trace.skipping import reraise
from jackfield.trace.tracer import Steps


@dataclass(frozen=True, slots=True)
class Job:
    """What one trace or invoke asks for."""

    engine: Engine
    model: Any  # the front, which a block function gets as its first argument
    sampling: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any] | None = None
    gradients: bool = False

    def request(self, prompt: Prompt, block: Block | None, sampling: Sampling) -> Request:
        """One admitted request."""
        if not isinstance(self.gradients, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # the caller's
            raise InvalidRequest(f"gradients={self.gradients!r}: write True or False.")
        if self.gradients and self.engine.no_gradients is not None:
            raise Unavailable(f"gradients=True is not available: {self.engine.no_gradients}.")
        token_ids = tokenize(prompt, self.engine.tokenizer, self.chat_template_kwargs)
        self.engine.admit(token_ids, sampling)
        if block is not None:
            self.engine.admit_block(token_ids)
        return Request(prompt, token_ids, sampling, block, self.model, self.gradients)


def run(job: Job, prompts: Any, block: Block | None) -> Any:
    """A Result for one prompt, a list for several, an iterator of results for a stream of prompts."""
    parsed = parse_prompts(prompts)
    sampling = Sampling.parse(**job.sampling)
    if isinstance(parsed, One):
        (outcome,) = job.engine.outcomes(iter([job.request(parsed.prompt, block, sampling)]))
        raise_errors([outcome], of=1)
        return result(outcome)
    if isinstance(parsed, Many):
        requests = [job.request(prompt, block, sampling) for prompt in parsed.prompts]
        found = list(job.engine.outcomes(iter(requests)))
        raise_errors(found, of=len(found))
        return [result(outcome) for outcome in found]
    requests_of = (job.request(prompt, block, sampling) for prompt in parsed.prompts)
    return _stream(job.engine, requests_of)


def _stream(engine: Engine, requests: Iterator[Request]) -> Iterator[Result]:
    errors: list[Exception] = []
    count = 0
    for outcome in engine.outcomes(requests):
        count += 1
        errors += [letting_go(error) for error in outcome.errors if error is not None]
        yield result(outcome)
    _raise(errors, of=count)


def result(outcome: Outcome) -> Result:
    """One outcome as its caller sees it: single values, or lists where there are several samples."""
    completions = outcome.completions

    def each(items: Sequence[Any]) -> Any:
        return items[0] if len(items) == 1 else list(items)

    return Result(
        prompt_token_ids=completions[0].prompt_token_ids,
        text=each([completion.text for completion in completions]),
        token_ids=each([completion.token_ids for completion in completions]),
        finish_reason=each([completion.finish_reason for completion in completions]),
        logprobs=each([completion.logprobs for completion in completions]),
        saved=each(outcome.saved),
        returned=each(outcome.returned),
        error=each([without_traceback(error) for error in outcome.errors]),
    )


def raise_errors(found: Sequence[Outcome], *, of: int) -> None:
    """Raises the one error of these outcomes, or an ExceptionGroup of them."""
    errors = [error for outcome in found for error in outcome.errors if error is not None]
    for outcome in found:
        outcome.errors = [without_traceback(error) for error in outcome.errors]
    _raise(errors, of=of)


def _raise(errors: list[Exception], *, of: int) -> None:
    """Raises the one error, or all as a group, and empties the list."""
    try:
        if len(errors) == 1:
            reraise(errors[0])
        if errors:
            reraise(ExceptionGroup(f"{len(errors)} blocks of {of} prompts failed", errors))
    finally:
        errors.clear()  # a raised error leads to this frame: the cycle would keep the block's tensors alive


def saved_values(block: Block, found: Sequence[Outcome], *, several: bool) -> dict[str, Any]:
    """What a body's saves bind in the caller: values, or lists of them where there are several prompts."""
    per_prompt = [outcome.saved[0] if len(outcome.saved) == 1 else _merged(outcome.saved) for outcome in found]
    if several:
        return {
            name: [saved.get(name) for saved in per_prompt]
            for name in block.saved_names
            if any(name in saved for saved in per_prompt)
        }
    return {name: per_prompt[0][name] for name in block.saved_names if name in per_prompt[0]}


def _merged(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for saved in samples for name in saved)
    return {name: [saved.get(name) for saved in samples] for name in names}


def _caller() -> FrameType:
    """The frame of the `with` whose `__enter__` asks."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # inspect.stack would read every file on the way


class _Lifted:
    """A `with` whose body becomes a block, and the frame that it stands in."""

    def __init__(self, frame: FrameType, tracer: object) -> None:
        self.body = Body.skip(frame, tracer)
        self.frame: FrameType | None = frame

    def bind(self, values: Mapping[str, Any]) -> None:
        """Binds saved values in the caller's frame, and lets go of it."""
        frame, self.frame = self.frame, None
        if frame is not None:
            bind(frame, values)


class Trace:
    """`with model.trace(...) as t`: outside the block it has the results."""

    def __init__(self, job: Job, prompts: Any = None) -> None:
        self.job, self._prompts = job, prompts
        self._lifted: _Lifted | None = None
        self.invokes: list[Invoke] = []
        self._results: list[Result] | None = None
        self._several = False

    def __enter__(self) -> "Trace":
        self._sampling = Sampling.parse(**self.job.sampling)
        if self._prompts is not None:
            self._parsed = parse_prompts(self._prompts)
            self._lifted = _Lifted(_caller(), self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._lifted is None:
            if kind is None:
                self._run_invokes()
            return False
        if not self._lifted.body.left(kind):
            return False
        self._run_body(self._lifted)
        return True

    def invoke(self, prompt: Any, **sampling: Any) -> "Invoke":
        """`with t.invoke(prompt, **sampling):` gives one prompt a body of its own. It runs when the trace ends."""
        if self._prompts is not None:
            raise TracingError(
                "This trace has its prompt already; write `with model.trace() as t:` to invoke prompts one by one."
            )
        return Invoke(self, parse_prompt(prompt), {**self.job.sampling, **sampling})

    @property
    def result(self) -> Result:
        """The result of the one prompt."""
        results = self.results
        if len(results) != 1:
            raise TracingError(f"This trace had {len(results)} prompts: their results are t.results.")
        return results[0]

    @property
    def results(self) -> list[Result]:
        """The results of all prompts, in their order."""
        if self._results is None:
            raise TracingError("There is no result yet: the block runs when its `with` ends.")
        return self._results

    @property
    def iter(self) -> Steps:
        """Inside a block: its steps."""
        raise TracingError(
            "t.iter has steps only inside a block: within `with model.trace(prompt)` or `with t.invoke(prompt)`."
        )

    def gradient(self, loss: Any, values: Any) -> Any:
        """Inside a block of a trace with `gradients=True`: d `loss` / d each of `values`."""
        raise TracingError(
            "t.gradient has a graph only inside a block: within `with model.trace(prompt, gradients=True)`."
        )

    def _run_body(self, lifted: _Lifted) -> None:
        parsed, block = self._parsed, lifted.body.block
        prompts = [parsed.prompt] if isinstance(parsed, One) else parsed.prompts
        requests = (self.job.request(prompt, block, self._sampling) for prompt in prompts)
        if not isinstance(parsed, Stream):
            requests = iter(list(requests))  # all are admitted before one runs
        found = list(self.job.engine.outcomes(requests))
        self._results = [result(outcome) for outcome in found]
        lifted.bind(saved_values(block, found, several=not isinstance(parsed, One)))
        raise_errors(found, of=len(found))

    def _run_invokes(self) -> None:
        if not self.invokes:
            raise InvalidRequest(
                "This trace has no prompt: give one to model.trace(prompt), or `with t.invoke(prompt):` inside."
            )
        invokes = self.invokes
        found = list(self.job.engine.outcomes(iter([invoke.request() for invoke in invokes])))
        self._results = [result(outcome) for outcome in found]
        for invoke, outcome in zip(invokes, found, strict=True):
            invoke.bind(outcome)
        raise_errors(found, of=len(found))


class Invoke:
    """`with t.invoke(prompt):` one prompt of a trace, and its own body."""

    def __init__(self, trace: Trace, prompt: Prompt, sampling: Mapping[str, Any]) -> None:
        self._trace, self._prompt, self._sampling = trace, prompt, Sampling.parse(**sampling)
        self._lifted: _Lifted | None = None

    def __enter__(self) -> "Invoke":
        self._lifted = _Lifted(_caller(), self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._lifted is not None
        if not self._lifted.body.left(kind):
            return False
        self._trace.invokes.append(self)
        return True

    def request(self) -> Request:
        """This prompt's request."""
        assert self._lifted is not None
        return self._trace.job.request(self._prompt, self._lifted.body.block, self._sampling)

    def bind(self, outcome: Outcome) -> None:
        """Binds what its block saved."""
        assert self._lifted is not None
        self._lifted.bind(saved_values(self._lifted.body.block, [outcome], several=False))
