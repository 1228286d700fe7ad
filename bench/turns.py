"""Processes of the libraries that take turns, so that no library has the machine at a better time than another."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from bench.environments import ROOT, Environment
from bench.jobs import MEMORY, Job

# Seconds of each case: by job, by process, by case.
Seconds: TypeAlias = dict[str, dict[str, dict[str, list[float]]]]

# The threads of a process that has just had its turn spin for some milliseconds before they sleep.
PAUSE_S = 0.2
OURS = "jackfield"  # whose numbers the tables are about


class Process:
    """A worker in a library's environment. Idle, it takes no time of the machine.

    `program` is the worker's module, and what it is told before the library, the folder and the threads.
    """

    def __init__(
        self,
        environment: Environment,
        folder: Path,
        threads: int,
        *,
        program: Sequence[str] = ("bench.worker",),
        **variables: str,
    ) -> None:
        self.library = environment.library
        command = [str(environment.python), "-m", *program, self.library, str(folder), str(threads)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_variables(threads) | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request; RuntimeError if the process has died over it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.library} ended with {self._process.wait()}; see above")
        return json.loads(line)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def process(
    environment: Environment,
    folder: Path,
    threads: int,
    *,
    program: Sequence[str] = ("bench.worker",),
    **variables: str,
) -> Generator[Process, None, None]:
    """A worker that is closed at the end."""
    found = Process(environment, folder, threads, program=program, **variables)
    try:
        yield found
    finally:
        found.close()


def timed(
    environments: Sequence[Environment],
    folder: Path,
    jobs: Sequence[Job],
    *,
    threads: int,
    rounds: int,
    repeats: int | None = None,
) -> tuple[Seconds, dict[str, dict[str, str]]]:
    """Seconds of every case of these jobs, and the versions in each environment.

    All processes are there from the beginning. In each round each of them has one turn, in another order each time.
    A turn is `repeats` times all cases; where it is None, as many as the job's budget has room for.
    """
    seconds: Seconds = {}
    versions: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        processes = [stack.enter_context(process(each, folder, threads)) for each in environments]
        for job in jobs:
            ready = _ready(processes, job)
            versions |= {each.library: answer["versions"] for each, answer in ready}
            turn = repeats or job.repeats(sum(answer["once_s"] for _, answer in ready), rounds)
            seconds[job.name] = _rounds([each for each, _ in ready], job, rounds, turn)
    return seconds, versions


def _ready(processes: Sequence[Process], job: Job) -> list[tuple[Process, dict[str, Any]]]:
    """The processes that have cases in this job, and what they say about it."""
    found: list[tuple[Process, dict[str, Any]]] = []
    for each in processes:
        _say(f"{job.name}: {each.library} gets ready")
        if answer := answered(each, "prepare", job=job.name):
            found.append((each, answer))
    return found


def _rounds(processes: Sequence[Process], job: Job, rounds: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {each.library: {} for each in processes}
    for number in range(rounds):
        _say(f"{job.name}: round {number + 1} of {rounds}, every case {repeats} times")
        start = number % len(processes)
        for each in (*processes[start:], *processes[:start]):
            time.sleep(PAUSE_S)
            answer = answered(each, "time", job=job.name, repeats=repeats, first=number * repeats)
            for case, seconds in answer.get("seconds", {}).items():
                found[each.library].setdefault(case, []).extend(seconds)
    return found


def remembered(environments: Sequence[Environment], folder: Path, *, threads: int) -> list[dict[str, Any]]:
    """Peak and kept memory of each case, each in a process of its own."""
    by_library = {each.library: each for each in environments}
    found: list[dict[str, Any]] = []
    for case in MEMORY:
        if case.library not in by_library:
            continue
        _say(f"memory: {case.job}, {case.key}")
        # Without this glibc moves the threshold with what is freed, and blocks of some MB stay with the process.
        with process(by_library[case.library], folder, threads, MALLOC_MMAP_THRESHOLD_="131072") as each:
            if answer := answered(each, "memory", job=case.job, case=case.key):
                found.append({"job": case.job, "case": case.key, **answer})
    return found


def answered(process: Process, do: str, **arguments: Any) -> dict[str, Any]:
    """The answer; none of a peer that has died over it, whose place in the table stays empty. Ours may not die."""
    if not process.alive:
        return {}
    try:
        return process.ask(do, **arguments)
    except (RuntimeError, BrokenPipeError) as error:
        if process.library == OURS:
            raise
        _say(f"without {process.library} from here on: {error}")
        return {}


def _variables(threads: int) -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return os.environ | quiet | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)
