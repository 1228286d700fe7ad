"""What goes wrong in one request: it ends with its own error, the others go on, and nothing is left behind."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jackfield as jf
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, engine_of, nothing_is_left, prompt_of

pytestmark = pytest.mark.slow

PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((12, 7, 20))]


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    with tiny.llama(num_gpu_blocks_override=40) as model:
        yield model


def streams(m: jf.Model, t: Any) -> Any:
    return [m.layers[2].layer_output.clone() for _ in t.iter[:]]


class Broken:
    """What cannot be made again from its pickle."""

    def __reduce__(self) -> Any:
        return _never, ()


def _never() -> None:
    raise LookupError("not to be made here")


def raises(m: jf.Model, t: Any) -> None:
    for step in t.iter[:]:
        m.layers[1].layer_output.sum()
        if step == 2:
            raise KeyError("of its own")


def broken() -> Any:
    outside = Broken()

    def block(m: jf.Model, t: Any) -> Any:
        return outside

    return block


def wider(m: jf.Model, t: Any) -> None:
    m.layers[1].layer_output = torch.zeros(1, 3, 3)


def never(m: jf.Model, t: Any) -> None:
    m.layers[3].layer_output.sum()
    m.layers[0].layer_output.sum()


def unsendable(m: jf.Model, t: Any) -> None:
    t.save(lines=(line for line in ()))


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        pytest.param(raises, KeyError, "of its own", id="raises"),
        pytest.param(broken(), LookupError, "not to be made here", id="cannot be unpickled"),
        pytest.param(wider, jf.EditMismatch, r"shape \(1, 3, 3\)", id="of another shape"),
        pytest.param(never, jf.OutOfOrder, "layer_output of step 0 has gone by", id="out of order"),
        pytest.param(unsendable, jf.TracingError, r"saved \(lines\) or returned cannot be sent", id="unsendable"),
    ],
)
def test_a_failure_is_its_own_requests(model: jf.Model, block: Any, error: type[Exception], message: str) -> None:
    alone = [model.run(prompt, streams, max_tokens=6, ignore_eos=True) for prompt in PROMPTS]
    results: list[Any] = []

    def stream() -> None:
        with contextlib.suppress(error):
            results.extend(model.run(iter(PROMPTS), streams, max_tokens=6, ignore_eos=True))

    other = threading.Thread(target=stream)
    other.start()
    with pytest.raises(error, match=message):
        model.run(PROMPTS[0], block, max_tokens=6, ignore_eos=True)
    other.join()
    for result, expected in zip(results, alone, strict=True):
        assert result.token_ids == expected.token_ids
        close(result.returned, expected.returned)
    nothing_is_left(model)


def test_an_error_in_a_tap_ends_its_request_alone(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jackfield's own code, between the model and the block."""
    from jackfield.engines.vllm.passing import StreamChannel

    alone = model.run(PROMPTS[1], streams, max_tokens=4, ignore_eos=True)
    read, made = StreamChannel.read, list[int]()

    def failing(self: StreamChannel, passing: Any, *rest: Any) -> Any:
        made.append(passing.x.shape[0])
        if passing.x.shape[0] == len(PROMPTS[0]):
            raise RuntimeError("a mistake of ours")
        return read(self, passing, *rest)

    def failing_together(self: StreamChannel, waiting: Any) -> Any:
        raise RuntimeError(f"a mistake of ours, of {len(waiting)}")

    monkeypatch.setattr(StreamChannel, "read", failing)
    monkeypatch.setattr(StreamChannel, "read_together", failing_together)
    seen: list[jf.Result] = []
    with pytest.raises(RuntimeError, match="a mistake of ours"):  # noqa: PT012
        for result in model.run(iter(PROMPTS[:2]), streams, max_tokens=4, ignore_eos=True):
            seen.append(result)
    assert made
    assert [result.finish_reason for result in seen] == ["error", "length"]
    assert seen[1].token_ids == alone.token_ids
    close(seen[1].returned, alone.returned)
    nothing_is_left(model)


def slow(m: jf.Model, t: Any) -> None:
    for _ in t.iter[:]:
        m.layers[0].layer_output.sum()
        time.sleep(0.02)


def test_ctrl_c_in_the_client(model: jf.Model) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            model.run(PROMPTS, slow, max_tokens=200, ignore_eos=True)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    nothing_is_left(model)
    assert len(model.run(PROMPTS[0], max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_stream_that_is_left(model: jf.Model) -> None:
    stream = model.run(iter(PROMPTS * 5), streams, max_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    nothing_is_left(model)


def test_a_client_that_goes_away(model: jf.Model) -> None:
    """The scheduler says that a request has ended, and nobody asks what became of its block."""
    driver = engine_of(model)._driver

    def ask() -> None:
        with contextlib.suppress(jf.EngineDied):
            model.run(PROMPTS[0], slow, max_tokens=200, ignore_eos=True)

    client = threading.Thread(target=ask)
    client.start()
    while not driver._waiting:
        time.sleep(0.01)
    time.sleep(0.2)
    (name,) = driver._waiting

    def leave() -> None:
        _, future = driver._waiting.pop(name)
        driver.llm.llm_engine.abort_request([name])
        future.set_exception(jf.EngineDied("its client is gone"))

    driver.do(leave)
    client.join()
    model.run(PROMPTS[1], max_tokens=2)
    held = engine_of(model).held
    assert (held["companions"], held["ids"], held["waiting"], held["fates"]) == (0, 0, 0, 1)
    fate = driver.do(lambda: engine_of(model)._fates([name]))[0]
    assert fate.error is None
    nothing_is_left(model)


def test_large_results_are_mapped_and_small_ones_sent(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        drawn = torch.randn(700, 700, generator=torch.Generator().manual_seed(0))
        return {"large": drawn, "half": drawn.bfloat16(), "flags": drawn > 0, "small": torch.arange(3)}

    found = model.run(PROMPTS[0], block).returned
    drawn = torch.randn(700, 700, generator=torch.Generator().manual_seed(0))
    assert found["large"].equal(drawn)
    assert found["half"].equal(drawn.bfloat16())
    assert found["flags"].equal(drawn > 0)
    assert found["small"].tolist() == [0, 1, 2]
    found["large"] += 1  # it is the caller's own
    nothing_is_left(model)


def test_what_is_shared_is_sent_once(model: jf.Model) -> None:
    bank = model.share(torch.ones(2, model.hidden_size))
    for _ in range(2):
        with model.trace(PROMPTS[:2]):
            shape = (model.layers[0].layer_output @ bank.T).shape.save()
        assert shape == [(1, 12, 2), (1, 7, 2)]
        assert engine_of(model).held["shared"] == 1
    del bank
    model.run(PROMPTS[0])
    nothing_is_left(model)


def test_a_closed_model_says_so() -> None:
    model = tiny.llama(num_gpu_blocks_override=40)
    model.close()
    model.close()
    with pytest.raises(jf.EngineDied, match="was closed"):
        model.run(PROMPTS[0])
