"""A long mixed load: requests of random lengths that come in a stream, to plain vLLM and to jackfield.

Prefix caching and chunked prefill are as vLLM has them. A request's time per token is the time from when it was to
come until it has ended, over the tokens it made: waiting counts.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jackfield as jf
from bench.gpu.ours import Ours, asked
from bench.gpu.plain import PlainVllm, sampling
from bench.gpu.rows import ONE_IN, PLAIN
from bench.gpu.scales import Load


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the load, and when it comes: seconds from the beginning."""

    at_s: float
    prompt: list[int]
    new: int


def drawn(load: Load, words: range, seed: int) -> list[Arrival]:
    """Gaps and lengths depend on the seed alone; tokens are new each time, so that no cache knows them."""
    lengths, tokens = random.Random(seed), random.Random()
    at_s, found = 0.0, list[Arrival]()
    for _ in range(load.requests):
        at_s += lengths.expovariate(load.rate)
        prompt = [tokens.randrange(words.start, words.stop) for _ in range(lengths.randint(*load.prompt))]
        found.append(Arrival(at_s, prompt, lengths.randint(*load.new)))
    return found


def timed(mode: str, plain: PlainVllm, ours: Ours, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """How long the load took, the tokens it made, and the seconds per token of each request."""
    began = time.perf_counter()
    ended = _through(plain, arrivals) if mode == PLAIN else _calls(ours, mode, arrivals)
    took_s = time.perf_counter() - began
    each = [(end - arrival.at_s) / arrival.new for end, arrival in zip(ended, arrivals, strict=True)]
    return {"seconds": took_s, "tokens": sum(arrival.new for arrival in arrivals), "per_token_s": each}


def _through(plain: PlainVllm, arrivals: Sequence[Arrival]) -> list[float]:
    """When each ended, in plain vLLM: one loop that adds what has come and steps."""
    engine, began = plain.llm.llm_engine, time.perf_counter()
    ended: dict[str, float] = {}
    coming = list(enumerate(arrivals))
    while len(ended) < len(arrivals):
        while coming and coming[0][1].at_s <= time.perf_counter() - began:
            number, arrival = coming.pop(0)
            engine.add_request(str(number), {"prompt_token_ids": arrival.prompt}, sampling(arrival.new))
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, coming[0][1].at_s - (time.perf_counter() - began)))
            continue
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = time.perf_counter() - began
    return [ended[str(number)] for number in range(len(arrivals))]


def _calls(ours: Ours, mode: str, arrivals: Sequence[Arrival]) -> list[float]:
    """The same in jackfield: a call for each request, made when it comes, in a thread that waits for it."""
    began = time.perf_counter()
    waiting: list[Future[float]] = []
    with ThreadPoolExecutor(len(arrivals)) as callers:
        for number, (arrival, call) in enumerate(zip(arrivals, _asked(ours, mode, len(arrivals)), strict=True)):
            time.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
            waiting.append(callers.submit(_ended, call, number, arrival, began))
        return [each.result() for each in waiting]


def _ended(call: Callable[[Arrival], Any], number: int, arrival: Arrival, began: float) -> float:
    """When a request's answer was there; ValueError where it is not as long as it should be."""
    made = len(call(arrival).token_ids)
    if made != arrival.new:
        raise ValueError(f"request {number}: {made} tokens, where it should have {arrival.new}")
    return time.perf_counter() - began


def _asked(ours: Ours, mode: str, count: int) -> list[Callable[[Arrival], Any]]:
    """What is called for each request."""
    edit = ours.edit_one_layer()

    def run(block: Any) -> Callable[[Arrival], Any]:
        return lambda arrival: ours.model.run(arrival.prompt, block, **asked(arrival.new))

    def steered(number: int) -> Callable[[Arrival], Any]:
        steer = jf.Steer(ours.site, ours.vectors[number % len(ours.vectors)], 1.0)
        return lambda arrival: ours.model.generate(arrival.prompt, [steer], **asked(arrival.new))[0]

    made: dict[str, Callable[[int], Callable[[Arrival], Any]]] = {
        "idle": lambda number: run(None),
        "one-in-eight": lambda number: run(None if number % ONE_IN else edit),
        "steered": steered,
    }
    return [made[mode](number) for number in range(count)]
