"""Errors in blocks: whose they are, where they show, and what goes on."""

import asyncio
import importlib
import itertools
import traceback
from typing import Any

import pytest

import jackfield as jf


class OwnError(Exception):
    """An error of the user's, which cannot be made without both arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")
        self.one, self.other = one, other


def user_lines(error: BaseException) -> list[str]:
    """The lines of this file in an error's traceback, outermost first."""
    return [frame.line or "" for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]


def test_an_error_keeps_its_class_and_its_line(model: jf.Model, prompt: list[int]) -> None:
    divided = pytest.raises(ZeroDivisionError)
    with divided as caught, model.trace(prompt):
        x = model.layers[0].layer_output
        y = x.shape[0] // 0
        print(y)
    assert user_lines(caught.value)[-1] == "y = x.shape[0] // 0"


def test_an_error_keeps_its_cause_and_its_attributes(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        try:
            m.layers[0].layer_output[99]
        except IndexError as error:
            raise OwnError(1, other=2) from error

    with pytest.raises(OwnError, match="1 and 2") as caught:
        model.run(prompt, block)
    assert (caught.value.one, caught.value.other) == (1, 2)
    assert isinstance(caught.value.__cause__, IndexError)
    assert user_lines(caught.value)[-1] == "raise OwnError(1, other=2) from error"


def test_what_no_coroutine_can_raise_ends_the_wait_for_it(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        next(iter([m.layers[0].layer_output][1:]))

    with pytest.raises(StopIteration):
        model.run(prompt, block)
    with pytest.raises(jf.TracingError, match=r"raised StopIteration\(None\), which no coroutine can raise") as caught:
        asyncio.run(asyncio.wait_for(model.arun(prompt, block), timeout=30))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_refusal_shows_the_line_of_the_user(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        m.layers[0].layer_output.sum()
        m.layers[0].layer_input.sum()

    with pytest.raises(jf.OutOfOrder) as caught:
        model.run(prompt, block)
    assert user_lines(caught.value)[-1] == "m.layers[0].layer_input.sum()"


@pytest.mark.parametrize("step", [0, 1, 2])
def test_it_ends_at_once(model: jf.Model, prompt: list[int], step: int) -> None:
    results: list[jf.Result] = []

    def source() -> Any:
        yield prompt

    def block(m: jf.Model, t: Any) -> None:
        for now in t.iter[:]:
            m.layers[0].layer_output.sum()
            assert now != step

    stream = model.run(source(), block, max_tokens=5, ignore_eos=True)
    results.append(next(stream))
    assert results[0].finish_reason == "error"
    assert isinstance(results[0].error, AssertionError)
    assert len(results[0].token_ids) == step + 1
    with pytest.raises(AssertionError):
        next(stream)


def test_the_next_trace_works(model: jf.Model, prompt: list[int]) -> None:
    plain = model.run(prompt, lambda m, t: m.logits).returned
    with pytest.raises(KeyError):
        model.run(prompt, lambda m, t: {}[m.logits])
    assert model.run(prompt, lambda m, t: m.logits).returned.equal(plain)


def test_others_finish_and_are_bound_first(model: jf.Model, prompts: list[list[int]]) -> None:
    h = None
    refused = pytest.raises(ValueError, match="too short: 3")
    with refused, model.trace(prompts, max_tokens=2, ignore_eos=True) as t:
        h = model.layers[0].layer_output.save()
        if h.shape[1] == 3:
            raise ValueError(f"too short: {h.shape[1]}")
    assert [None if x is None else x.shape[1] for x in h] == [7, None, 5]
    assert [result.finish_reason for result in t.results] == ["length", "error", "length"]
    assert [type(result.error) for result in t.results] == [type(None), ValueError, type(None)]
    assert t.results[0].token_ids == model.run(prompts[0], max_tokens=2, ignore_eos=True).token_ids


def test_several_errors_are_a_group(model: jf.Model, prompts: list[list[int]]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        length = m.layers[0].layer_output.shape[1]
        if length != 5:
            raise OwnError(length, 0)

    with pytest.raises(ExceptionGroup, match="2 blocks of 3 prompts failed") as caught:
        model.run(prompts, block)
    assert [error.one for error in caught.value.exceptions if isinstance(error, OwnError)] == [7, 3]


def test_an_invoke_that_fails_leaves_the_others(model: jf.Model, prompts: list[list[int]]) -> None:
    kept = None
    divided = pytest.raises(ZeroDivisionError)
    with divided, model.trace() as t:
        with t.invoke(prompts[0]):
            bad = 1 / 0
            bad.save()
        with t.invoke(prompts[1]):
            kept = model.input_ids.save()
    assert kept.tolist() == [prompts[1]]


class Large:
    """Something that blocks hold while they fail; it counts how many there are."""

    alive = 0

    def __init__(self) -> None:
        Large.alive += 1

    def __del__(self) -> None:
        Large.alive -= 1


def test_a_stream_keeps_its_errors_and_not_what_their_blocks_held(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        held = importlib.import_module(__name__).Large()  # the class itself, where vLLM sends the block as a copy
        try:
            raise KeyError(held.__class__.__name__)
        except KeyError as error:
            raise ZeroDivisionError("here") from error

    stream = model.run(iter([prompt] * 20), block)
    alive = [Large.alive for _ in itertools.islice(stream, 20)]
    assert max(alive) <= 8  # those of one batch
    with pytest.raises(ExceptionGroup, match="20 blocks of 20 prompts failed") as raised:
        next(stream)
    for error in raised.value.exceptions:
        assert "raise ZeroDivisionError" in "".join(traceback.format_exception(error))
        assert isinstance(error.__cause__, KeyError)


def test_a_stream_gives_the_results_and_then_the_error(model: jf.Model, prompts: list[list[int]]) -> None:
    def block(m: jf.Model, t: Any) -> None:
        if m.input_ids.shape[1] == 3:
            raise OwnError(3, 0)

    seen = []
    stream = model.run(iter(prompts), block)
    with pytest.raises(OwnError):  # noqa: PT012
        for result in stream:
            seen.append(result.finish_reason)
    assert seen == ["length", "error", "length"]


def test_an_interrupt_goes_through(model: jf.Model, prompts: list[list[int]]) -> None:
    """Nothing is caught, nothing is left behind, and the model runs on."""
    plain = model.run(prompts[0], lambda m, t: m.logits).returned

    def block(m: jf.Model, t: Any) -> None:
        m.layers[1].layer_output.sum()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.run(prompts, block, max_tokens=3)
    assert model.run(prompts[0], lambda m, t: m.logits).returned.equal(plain)


def test_finally_runs_in_a_block_that_is_ended(model: jf.Model, prompts: list[list[int]]) -> None:
    """The interrupt of one block ends the others where they wait."""

    def block(m: jf.Model, t: Any) -> None:
        try:
            m.layers[1].layer_output.sum()
            if m.input_ids.shape[1] == 3:
                raise KeyboardInterrupt
            m.logits.sum()
        finally:
            print("ended")

    with pytest.raises(KeyboardInterrupt):
        model.run(prompts, block)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("result", jf.TracingError, "no t.result inside a block"),
        ("results", jf.TracingError, "no t.results inside a block"),
        ("position", jf.UnknownValue, "t has no 'position'.* Did you mean 'positions'"),
    ],
)
def test_what_t_does_not_have_in_a_block(
    model: jf.Model, prompt: list[int], name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model.run(prompt, lambda m, t: getattr(t, name))


def test_an_unavailable_value_says_why(model: jf.Model, prompt: list[int]) -> None:
    reason = model.support(0)["router_logits"]
    assert reason is not None
    with pytest.raises(jf.Unavailable, match="router_logits is not available"):
        model.run(prompt, lambda m, t: m.layers[0].router_logits)


def test_catching_an_error_goes_on(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        try:
            _ = m.layers[0].router_logits
        except jf.Unavailable:
            return m.logits
        raise AssertionError

    assert model.run(prompt, block).returned.shape == (1, 1, model.vocab_size)
