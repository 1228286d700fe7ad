"""The stream of a harvest: prompts in, rows out, a shard written while the next one fills.

Prompts are drawn when the engine has room for them. Rows are taken in the order of the prompts, and a full shard is
handed to the writer. While the one before it is still being written, nothing is taken, so that the engine gets no
further prompts: a slow disk slows the run, and memory holds two shards and what the engine has in flight.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.engine import Engine, Outcome, Request
from jackfield.engines.prompt import Prompt
from jackfield.errors import HarvestError, InvalidIntervention, InvalidRequest
from jackfield.harvest.asked import Limits
from jackfield.harvest.folder import Folder
from jackfield.harvest.manifest import Failure, Manifest
from jackfield.harvest.row_axis import RowAxis
from jackfield.harvest.shard import Shard
from jackfield.harvest.stored import Stored, cast
from jackfield.harvest.writer import Writer
from jackfield.trace.result import letting_go


@dataclass(frozen=True, slots=True)
class Tally:
    """How far a harvest is: prompts that are done, those of them that failed, tokens read, rows kept, shards written.

    Counts include what was done before a harvest went on.
    """

    prompts: int
    failed: int
    tokens: int
    rows: int
    shards: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt that was drawn: its number, the digest of all up to it, and its tokens, or why it has none."""

    number: int
    digest: str
    found: tuple[int, ...] | Exception


@dataclass(frozen=True, slots=True)
class Job:
    """What one harvest does with each prompt."""

    engine: Engine
    request: Callable[[Prompt], Request]
    """InvalidRequest or InvalidIntervention for a prompt that cannot be run."""
    axis: RowAxis
    shapes: Mapping[str, tuple[int, ...]]  # of a row of each tensor; 0 where only the run tells
    dtype: torch.dtype | None
    limits: Limits
    on_progress: Callable[[Tally], object] | None


class Run:
    """One harvest, from where its folder is to the end of the prompts."""

    def __init__(self, job: Job, folder: Folder, manifest: Manifest) -> None:
        self._job, self._folder, self._manifest = job, folder, manifest
        self._digest = hashlib.sha256()
        self._drawn: deque[Drawn] = deque()  # in the engine, or failed before it
        self._failed: list[Failure] = []  # since the last shard
        self._shard, self._rows_before = Shard(), manifest.rows
        self._writer = Writer()

    def run(self, prompts: "Iterator[Prompt | InvalidRequest]") -> None:
        """Runs what is not done yet. HarvestError where the prompts are not those of before, or writing fails."""
        self._pass_over(prompts)
        with self._writer, closing(self._outcomes(prompts)) as outcomes:
            for outcome in outcomes:
                self._take_failed()
                self._take(self._drawn.popleft(), outcome)
                del outcome  # its memory is free while the next is waited for
            self._take_failed()
            self._manifest = replace(self._manifest, finished=True)
            self._hand_over()

    # -- in

    def _pass_over(self, prompts: "Iterator[Prompt | InvalidRequest]") -> None:
        done = self._manifest.prompts
        found = 0
        for prompt in islice(prompts, done):
            found += 1
            self._add_to_digest(prompt)
        if found < done or (done and self._digest.hexdigest() != self._manifest.digest):
            what = f"only {found} prompts are given" if found < done else "they are not the same"
            raise HarvestError(
                f"{self._folder.path} holds a harvest of {done} prompts so far, and {what}. Give the same prompts in "
                "the same order, and it goes on behind them, or give another folder."
            )

    def _add_to_digest(self, prompt: object) -> str:
        self._digest.update(repr(prompt).encode() + b"\n")
        return self._digest.hexdigest()

    def _outcomes(self, prompts: "Iterator[Prompt | InvalidRequest]") -> Any:
        """A generator; what it has in the engine is given up when it is closed."""
        return self._job.engine.outcomes(self._requests(prompts))

    def _requests(self, prompts: "Iterator[Prompt | InvalidRequest]") -> Iterator[Request]:
        for number, prompt in enumerate(prompts, self._manifest.prompts):
            digest = self._add_to_digest(prompt)
            request = self._admitted(prompt)
            found = request if isinstance(request, Exception) else request.prompt_token_ids
            self._drawn.append(Drawn(number, digest, found))
            if isinstance(request, Request):
                yield request

    def _admitted(self, prompt: Prompt | InvalidRequest) -> Request | Exception:
        if isinstance(prompt, Exception):
            return prompt
        try:
            return self._job.request(prompt)
        except (InvalidRequest, InvalidIntervention) as error:
            return letting_go(error)

    # -- out

    def _take_failed(self) -> None:
        """Those that never got into the engine, as far as they are next."""
        while self._drawn and isinstance(self._drawn[0].found, Exception):
            drawn = self._drawn.popleft()
            assert isinstance(drawn.found, Exception)
            self._note(drawn, drawn.found)

    def _take(self, drawn: Drawn, outcome: Outcome) -> None:
        assert isinstance(drawn.found, tuple)
        failure = outcome.errors[0]
        if failure is None:
            columns = self._job.axis.columns(drawn.number, drawn.found)
            try:
                kept = self._cast(outcome.saved[0])
            except HarvestError as error:
                failure = error
            else:
                self._keep(columns, kept)
        self._note(drawn, failure)
        if self._shard.is_full(self._job.limits):
            self._hand_over()

    def _cast(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows, dtype = self._job.axis.rows, self._job.dtype
        return {name: cast(rows(saved[name]), dtype) for name in self._job.shapes}

    def _keep(self, columns: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
        rows = {**columns, **kept}
        stored = {name: Stored.of(each) for name, each in rows.items()}
        wanted = self._manifest.tensors or {**stored, **self._expected(kept)}
        number = len(columns["prompt"])
        for name, each in rows.items():
            if len(each) != number or stored[name] != wanted[name]:
                raise HarvestError(
                    f"{name} came as {each.dtype} {tuple(each.shape)} of prompt {int(columns['prompt'][0])}, and "
                    f"{number} rows of {wanted[name].dtype} {wanted[name].shape} are its place in {self._folder.path}."
                )
        self._manifest = replace(self._manifest, tensors=wanted)
        self._shard.add(rows)

    def _expected(self, kept: Mapping[str, Tensor]) -> dict[str, Stored]:
        """What is known before the first row came."""
        known = {name: shape for name, shape in self._job.shapes.items() if 0 not in shape}
        return {name: replace(Stored.of(kept[name]), shape=shape) for name, shape in known.items()}

    def _note(self, drawn: Drawn, failure: Exception | None) -> None:
        """A prompt is done."""
        tokens = 0
        if failure is not None:
            self._failed.append(Failure.of(drawn.number, failure))
        elif isinstance(drawn.found, tuple):
            tokens = len(drawn.found)
        now, done = self._manifest, drawn.number + 1
        self._manifest = replace(now, prompts=done, tokens=now.tokens + tokens, digest=drawn.digest, finished=False)
        if self._job.on_progress is not None:
            self._job.on_progress(self._tally())

    def _tally(self) -> Tally:
        now = self._manifest
        failed = len(now.failed) + len(self._failed)
        return Tally(now.prompts, failed, now.tokens, self._rows_before + self._shard.num_rows, len(now.shards))

    def _hand_over(self) -> None:
        """To the writer, when it has written what it was given before."""
        shard, self._shard = self._shard, Shard()
        self._manifest = replace(self._manifest, failed=(*self._manifest.failed, *self._failed))
        self._failed.clear()
        if shard.num_rows:
            self._manifest = self._manifest.with_shard(shard.num_rows)
            self._rows_before = self._manifest.rows
        self._writer.do(self._folder.write, shard if shard.num_rows else None, self._manifest)
