"""One library's process: it makes the cases of a job, checks them, and times them when it is told to.

Requests come as JSON lines on stdin, answers go out on stdout:

    {"do": "prepare", "job": "prompt"}                       -> {"once_s": ..., "versions": {...}}
    {"do": "time", "job": "prompt", "repeats": 5, "first": 2} -> {"seconds": {case: [...]}}
    {"do": "memory", "job": "prompt", "case": "..."}         -> {"peak_bytes": ..., "kept_bytes": ...}
"""

import gc
import json
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bench import memory
from bench.jobs import BY_HAND, PLAIN, Cases, key
from bench.libraries import cases
from bench.models import Models

# jackfield itself is measured as it lies here, installed or not.
PACKAGES = {"jackfield": (), "nnsight": ("nnsight",), "TransformerLens": ("transformer-lens",)}


class Worker:
    """The jobs that one library has cases for."""

    def __init__(self, library: str, folder: Path) -> None:
        self.library, self._folder = library, folder
        self._cases: dict[str, Cases] = {}

    def prepare(self, job: str) -> dict[str, Any]:
        """Makes a job's cases, checks what they read, and times one warm pass. No answer: none of them is its own."""
        cases = self._made(job)
        if not any(name.startswith(f"{self.library}.") for name in cases):
            return {}
        check(self.library, {name: case() for name, case in cases.items()})
        if self.library != "jackfield":  # by hand is timed once, beside jackfield
            self._cases[job] = {name: case for name, case in cases.items() if not name.startswith(BY_HAND)}
        seconds = self.time(job, repeats=1, first=0)["seconds"]
        return {"once_s": sum(map(sum, seconds.values())), "versions": versions(self.library)}

    def time(self, job: str, repeats: int, first: int) -> dict[str, Any]:
        """Seconds of every case in turn, `repeats` times over. Each time another one goes first, from `first` on."""
        cases = self._made(job)
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        gc.collect()
        for repeat in range(first, first + repeats):
            for name in rotated(list(cases), repeat):
                began = time.perf_counter()
                read = cases[name]()
                seconds[name].append(time.perf_counter() - began)
                del read
        return {"seconds": seconds}

    def memory(self, job: str, case: str) -> dict[str, Any]:
        """Peak and kept memory of a case, after it has run once."""
        return memory.measured(self._made(job)[case])

    def _made(self, job: str) -> Cases:
        if job not in self._cases:
            self._cases[job] = cases(self.library, Models(job, self._folder))
        return self._cases[job]


def rotated(names: list[str], by: int) -> list[str]:
    """The same names, beginning elsewhere: none is always the first one after a pause."""
    start = by % len(names)
    return names[start:] + names[:start]


def check(library: str, read: dict[str, Sequence[Tensor]]) -> None:
    """That what a library reads is what is read by hand, before anyone asks how fast it was.

    ValueError where a tensor is missing, has another shape, or differs by more than 1e-4 of its largest number.
    """
    for name, found in read.items():
        expected = read.get(key(BY_HAND, name.rpartition(".")[2]))
        if name.startswith((PLAIN, BY_HAND)) or expected is None or not found:
            continue
        if len(found) != len(expected):
            raise ValueError(f"{name} of {library} read {len(found)} tensors, and {len(expected)} by hand")
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            # Asked this way round, a NaN does not pass.
            if one.shape != other.shape or not (one - other).abs().max() <= 1e-4 * other.abs().max():
                raise ValueError(f"{name} of {library}, tensor {number}: not what is read by hand")


def versions(library: str) -> dict[str, str]:
    """What is installed in this environment."""
    return {package: metadata.version(package) for package in (*PACKAGES[library], "torch", "transformers")}


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """Answers until there are no more requests."""
    for line in requests:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


def main(library: str, folder: str, threads: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what the libraries print is not an answer
    torch.set_num_threads(int(threads))
    serve(Worker(library, Path(folder)), sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
