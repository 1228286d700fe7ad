"""A vLLM in processes of its own, asked what tests ask of one in theirs. Run as a script: prints one line of JSON.

    python -m tests.engines.vllm.several_processes FOLDER [leave]

With "leave" it says which processes it has, and ends without a word to them.
"""

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch

import jackfield as jf
from tests.engines.vllm.asking import engine_of, prompt_of

PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((12, 7, 20))]


class OwnError(Exception):
    """An error of this script's, which cannot be made without both arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")
        self.one, self.other = one, other


class Broken:
    """What cannot be made again from its pickle."""

    def __reduce__(self) -> Any:
        return {}.__getitem__, ("not there",)


def streams(m: jf.Model, t: Any) -> Any:
    return [m.layers[2].layer_output.clone() for _ in t.iter[:]]


def fails(m: jf.Model, t: Any) -> None:
    m.layers[2].layer_output.sum()
    raise OwnError(1, other=2)


def stops(m: jf.Model, t: Any) -> int:
    seen = 0
    for step in t.iter[:]:
        m.logits[..., 50 + step] = 1e4
        seen += 1
    return seen


def large(m: jf.Model, t: Any) -> Any:
    return torch.arange(2_000_000, dtype=torch.float64)


def slow(m: jf.Model, t: Any) -> None:
    for _ in t.iter[:]:
        m.layers[0].layer_output.sum()
        time.sleep(0.02)


def interrupts(m: jf.Model, t: Any) -> None:
    m.layers[0].layer_output.sum()
    raise KeyboardInterrupt


def sums(model: jf.Model) -> list[Any]:
    found = model.run(PROMPTS, streams, max_tokens=4, ignore_eos=True)
    return [[result.token_ids, [float(row.double().sum()) for row in result.returned]] for result in found]


def failure(model: jf.Model) -> list[Any]:
    try:
        model.run(PROMPTS[0], fails, max_tokens=3)
    except OwnError as error:
        lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
        return [error.one, error.other, lines[-1]]
    return []


def prints(m: jf.Model, t: Any) -> None:
    for step in t.iter[:]:
        print(f"{len(t.positions)} rows in step {step}")
        m.logits.sum()


def prints_and_fails(m: jf.Model, t: Any) -> None:
    print("about to fail")
    m.layers[2].layer_output.sum()
    raise OwnError(1, other=2)


def printed(model: jf.Model) -> list[str]:
    """What blocks print, by their clients' prompts, and what is printed by one that then fails."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        model.run(PROMPTS[:2], prints, max_tokens=2, ignore_eos=True)
        with contextlib.suppress(OwnError):
            model.run(PROMPTS[0], prints_and_fails, max_tokens=2)
    return out.getvalue().splitlines()


def broken(model: jf.Model) -> str:
    outside = Broken()

    def block(m: jf.Model, t: Any) -> Any:
        return outside

    try:
        model.run(PROMPTS[0], block)
    except KeyError as error:
        return repr(error)
    return "nothing"


def stopped(model: jf.Model) -> list[Any]:
    """The engine goes on while its client looks at a token: no block may see what comes after a stop string."""
    result = model.run(PROMPTS[0], stops, max_tokens=12, ignore_eos=True, stop="t52")
    return [result.returned, result.token_ids, result.text, result.finish_reason]


def mapped(model: jf.Model) -> bool:
    return model.run(PROMPTS[0], large).returned.equal(torch.arange(2_000_000, dtype=torch.float64))


def interrupted(model: jf.Model) -> list[str]:
    """By a block, and by Ctrl-C, which reaches the engine's processes as well."""
    heard: list[str] = []
    try:
        model.run(PROMPTS, interrupts, max_tokens=3)
    except KeyboardInterrupt:
        heard.append("block")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    threading.Timer(1.0, os.killpg, (os.getpgid(0), signal.SIGINT)).start()
    try:
        model.run(PROMPTS, slow, max_tokens=200, ignore_eos=True)
    except KeyboardInterrupt:
        heard.append("client")
    return heard


def children() -> list[int]:
    """The processes below this one, all the way down."""
    found, waiting = list[int](), [os.getpid()]
    while waiting:
        for thread in os.listdir(f"/proc/{waiting[0]}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{waiting[0]}/task/{thread}/children") as file:
                below = [int(each) for each in file.read().split()]
                found += below
                waiting += below
        del waiting[0]
    return found


def main(folder: str, *rest: str) -> None:
    from tests.engines.vllm.tiny import start_folder

    model = start_folder(folder, processes=True, num_gpu_blocks_override=40)
    if rest:
        threading.Thread(target=lambda: model.run(PROMPTS, slow, max_tokens=200, ignore_eos=True)).start()
        time.sleep(1.0)
        print(json.dumps(children()), flush=True)
        os._exit(0)
    answers = [sums, failure, printed, broken, stopped, mapped, interrupted]
    said: dict[str, Any] = {answer.__name__: answer(model) for answer in answers}
    said["again"] = sums(model)
    said["held"] = dict(engine_of(model).held)
    print(json.dumps(said), flush=True)
    model.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
