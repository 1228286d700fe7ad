"""One block on several ranks does the same on all of them: its random numbers, and what is done where it does not.

A block is the same code with the same values everywhere, but for what it takes from elsewhere: the random numbers of
its process, the time, the order of a set of strings. The first are made the same. Of the others the ranks find out: a
block that reads something else than it does on another rank, or waits elsewhere, would leave them waiting for each
other for ever.
"""

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from greenlet import GreenletExit

from jackfield.engines.vllm.parts import Ranks
from jackfield.engines.vllm.traced_worker import TracedWorker
from jackfield.errors import TracingError
from jackfield.interleave.channel import Channel, Selection
from jackfield.interleave.step import Rows

PARTED = (
    "This block does not do the same on all {size} ranks of its model: on rank {rank} {what}, elsewhere something "
    "else. A block runs on every rank, so it must not depend on the time, the process or the order of a set."
)


class Randomness:
    """Random states of a block's own: torch's, numpy's and Python's, which begin with a seed made of `name`."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
        self._states = self._seeded(seed)

    @contextmanager
    def own(self) -> Generator[None]:
        """While it is open these are the states in use; those of the process are put back as they were."""
        before = self._taken()
        self._put(self._states)
        try:
            yield
        finally:
            self._states = self._taken()
            self._put(before)

    def _seeded(self, seed: int) -> tuple[Any, ...]:
        on_device = None if self._device is None else torch.Generator(self._device).manual_seed(seed).get_state()
        on_cpu = torch.Generator().manual_seed(seed).get_state()
        return on_cpu, on_device, np.random.RandomState(seed).get_state(), random.Random(seed).getstate()

    def _taken(self) -> tuple[Any, ...]:
        on_device = None if self._device is None else torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state(), on_device, np.random.get_state(), random.getstate()

    def _put(self, states: tuple[Any, ...]) -> None:
        on_cpu, on_device, numpys, pythons = states
        torch.set_rng_state(on_cpu)
        if self._device is not None:
            torch.cuda.set_rng_state(on_device, self._device)
        np.random.set_state(numpys)
        random.setstate(pythons)


@dataclass(slots=True)
class Alike:
    """What keeps one block the same on all ranks, and whether it still is."""

    ranks: Ranks
    randomness: Randomness
    parted: bool = False

    def check(self, what: str) -> None:
        """TracingError, on all ranks, where the block does something else here than elsewhere, or has done before."""
        if not self.parted and self.ranks.agree(what):
            return
        self.parted = True
        raise TracingError(PARTED.format(size=self.ranks.size, rank=self.ranks.rank, what=what))


class AlikeWorker(TracedWorker):
    """A worker that is held against those of the other ranks."""

    def __init__(self, rows: Rows, alike: Alike) -> None:
        super().__init__(rows)
        self._alike = alike

    def resume(self, message: Any) -> None:
        with self._held_together():
            super().resume(message)

    def throw(self, error: BaseException) -> None:
        is_ended = isinstance(error, GreenletExit)  # nobody waits for one that is
        with nullcontext() if is_ended else self._held_together():
            super().throw(error)

    @contextmanager
    def _held_together(self) -> Generator[None]:
        """The block runs on, with random states of its own, and then stands where it stands on the other ranks."""
        alike = self._alike
        try:
            with alike.randomness.own():
                yield
        finally:  # also where it was interrupted: the other ranks ask
            if not (alike.parted and self.error is not None):  # else it has been told
                alike.check(self._standing)

    @property
    def _standing(self) -> str:
        """Where the block is."""
        if self.done:
            return f"it has ended ({type(self.error or self.interrupt).__name__})"
        where = "the next step" if self.slot is None else str(self.slot.site)
        return f"it waits for {where} in step {self.waiting_step}"

    def _copy(self, channel: Channel, selection: Selection) -> Any:
        self._alike.check(f"it reads {channel.name} {selection}")
        return super()._copy(channel, selection)

    def _put(self, channel: Channel, selection: Selection, value: Any) -> None:
        self._alike.check(f"it writes {channel.name} {selection}")
        super()._put(channel, selection, value)
