"""Torch's thread-wide modes at a hand-over between a block and its engine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import jackfield as jf
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port, Site
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Channel, Selection, Worker


class Anywhere(Channel):
    """A channel of a tensor that passes as it is."""

    def __init__(self, name: str) -> None:
        self.name = self.memory = name
        self.site, self.writable = Site(name, Port.OUTPUT), True

    def read(self, passing: torch.Tensor, worker: Worker, selection: Selection) -> torch.Tensor:
        return passing.clone()


def state() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    device = torch.get_default_device(), torch.empty(0).device
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *device, *autocast


@contextmanager
def no_mode() -> Iterator[None]:
    yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": no_mode,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "inference": lambda: torch.inference_mode(True),
    "no inference": lambda: torch.inference_mode(False),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("block_mode", MODES)
@pytest.mark.parametrize("engine_mode", MODES)
def test_each_side_finds_its_own_modes(engine_mode: str, block_mode: str) -> None:
    worker, site = Worker(Rows(0, 0, 1)), Anywhere("a")
    seen: list[tuple[Any, ...]] = []

    def body() -> None:
        with MODES[block_mode]():
            seen.append(state())
            worker.read(site)
            seen.append(state())
            worker.reach_step(1)
            seen.append(state())

    worker.body = body
    with MODES[engine_mode]():
        before = state()
        interleaver = Interleaver([worker], lambda slot: None)
        interleaver.start()
        assert state() == before
        interleaver.begin(0)
        interleaver.meet(interleaver.slot(site.site), torch.ones(1, device="cpu"))
        assert state() == before
        interleaver.begin(1)
        assert state() == before
        interleaver.close()
    assert worker.error is None
    assert len(seen) == 3
    assert seen[1:] == seen[:-1]
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("block_mode", ["gradients", "no gradients", "inference", "device"])
@pytest.mark.parametrize(
    ("first", "second"),  # the other modes are an engine's for all of a run, or for none of it
    [(first, second) for first in ("none", "no gradients") for second in ("none", "no gradients")]
    + [("inference", "inference")],
)
def test_modes_that_change_from_meeting_to_meeting(first: str, second: str, block_mode: str) -> None:
    """Neither side's change in between is taken for the other's, where both began alike."""
    worker, sites = Worker(Rows(0, 0, 1)), [Anywhere("a"), Anywhere("b"), Anywhere("c")]
    seen: list[tuple[Any, ...]] = []

    def body() -> None:
        worker.read(sites[0])
        seen.append(state())
        worker.read(sites[1])
        seen.append(state())
        with MODES[block_mode]():
            inside = state()
            worker.read(sites[2])
            assert state() == inside
        seen.append(state())

    worker.body = body
    interleaver = Interleaver([worker], lambda slot: None)
    with MODES[first]():
        interleaver.start()
    interleaver.begin(0)
    for mode, site in zip((first, second, first), sites, strict=True):
        with MODES[mode]():
            before = state()
            interleaver.meet(interleaver.slot(site.site), torch.ones(1, device="cpu"))
            assert state() == before
    assert worker.done
    assert worker.error is None
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("size", [4, 1 << 16], ids=["small", "large"])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
def test_a_change_after_the_block_has_moved_on_is_seen(size: int, dropped: bool) -> None:
    worker, sites = Worker(Rows(0, 0, 1)), [Anywhere("a"), Anywhere("b"), Anywhere("c")]

    def body() -> object:
        kept = worker.read(sites[0])
        worker.read(sites[1])
        kept += 1
        if dropped:
            kept = None
        worker.read(sites[2])
        return kept

    worker.body = body
    interleaver = Interleaver([worker], lambda slot: None)
    interleaver.start()
    interleaver.begin(0)
    for site in sites:
        interleaver.meet(interleaver.slot(site.site), torch.ones(size))
    assert isinstance(worker.error, jf.OutOfOrder)
    assert "a of step 0 was changed in place after" in str(worker.error)
