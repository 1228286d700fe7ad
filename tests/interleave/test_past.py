"""What a block has moved past: each copy is looked at a few times, however many steps follow."""

import sys
import weakref
from types import FrameType

import torch
from torch import Tensor

import jackfield as jf
from jackfield.interleave.channel import Channel, Selection
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port, Site
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker


class Passed(Channel):
    """A tensor as it passes."""

    name = memory = "a"
    site, writable = Site("a", Port.OUTPUT), True

    def read(self, passing: Tensor, worker: Worker, selection: Selection) -> Tensor:
        return passing.clone()


def keeping(steps: int, *, change: int | None = None, size: int = 4) -> Worker:
    """The worker of a block that keeps what it reads in so many steps, and then changes one of these copies."""
    worker, channel = Worker(Rows(0, 0, 1)), Passed()

    def body() -> list[Tensor]:
        kept = list[Tensor]()
        for step in range(steps):
            worker.reach_step(step)
            kept.append(worker.read(channel))
        worker.reach_step(steps)
        if change is not None:
            kept[change] += 1
        return kept

    worker.body = body
    interleaver = Interleaver([worker], lambda slot: None)
    interleaver.start()
    for step in range(steps):
        interleaver.begin(step)
        interleaver.meet(interleaver.slots[channel.site], torch.ones(size))
        interleaver.end()
    interleaver.begin(steps)
    return worker


def calls(steps: int) -> int:
    """How many functions are called in so many steps."""
    count = 0

    def hear(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        assert keeping(steps).error is None
    finally:
        sys.setprofile(before)
    return count


def test_a_step_costs_the_same_however_many_there_were() -> None:
    """Kills: looking at each copy that is kept in each step that follows."""
    assert calls(400) < 2.2 * calls(200)


def test_a_change_of_any_of_them_is_seen() -> None:
    for change in (0, 30, 99):
        error = keeping(100, change=change).error
        assert isinstance(error, jf.OutOfOrder)
        assert f"a of step {change} was changed in place after the block had moved past it" in str(error)


def test_copies_that_nobody_has_are_let_go() -> None:
    """Kills: keeping all of them until the block ends."""
    read, alive = list[weakref.ref[Tensor]](), list[int]()

    def body() -> None:
        for step in range(200):
            worker.reach_step(step)
            read.append(weakref.ref(worker.read(channel)))
            alive.append(sum(each() is not None for each in read))

    worker, channel = Worker(Rows(0, 0, 1)), Passed()
    worker.body = body
    interleaver = Interleaver([worker], lambda slot: None)
    interleaver.start()
    for step in range(200):
        interleaver.begin(step)
        interleaver.meet(interleaver.slots[channel.site], torch.ones(4))
        interleaver.end()
    assert worker.error is None
    assert len(alive) == 200
    assert max(alive) < 40
