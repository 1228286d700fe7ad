"""Torch's thread-wide modes at a hand-over between a block and its engine."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils.flop_counter import FlopCounterMode

import jackfield as jf
from jackfield.interleave.channel import Channel, Selection
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port, Site
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker


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
        interleaver.meet(interleaver.slots[site.site], torch.ones(1, device="cpu"))
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
            interleaver.meet(interleaver.slots[site.site], torch.ones(1, device="cpu"))
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
        interleaver.meet(interleaver.slots[site.site], torch.ones(size))
    assert isinstance(worker.error, jf.OutOfOrder)
    assert "a of step 0 was changed in place after" in str(worker.error)


class Writable(Anywhere):
    """One that can be written to as well."""

    def write(self, passing: torch.Tensor, worker: Worker, selection: Selection, value: torch.Tensor) -> None:
        passing.copy_(value)


class Counting(TorchDispatchMode):
    """Counts the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def stacks() -> tuple[Any, ...]:
    layers = torch._C._functorch.get_dynamic_layer_stack_depth()  # type: ignore[attr-defined]
    flag = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    return *state(), torch._C._len_torch_dispatch_stack(), flag, layers, torch.get_default_dtype()  # type: ignore[attr-defined]


def run(body: Callable[[Worker, list[Writable]], object], *, inference: bool) -> tuple[Worker, list[torch.Tensor]]:
    """A block over three values of ones, whose engine finds its modes as they were; and what the values are then."""
    worker, sites = Worker(Rows(0, 0, 1)), [Writable(name) for name in "abc"]
    worker.body = lambda: body(worker, sites)
    with torch.inference_mode(inference), Counting() if not inference else no_mode():
        passed, before = [torch.ones(3) for _ in sites], stacks()
        interleaver = Interleaver([worker], lambda slot: None)
        interleaver.start()
        assert stacks() == before
        interleaver.begin(0)
        for site, tensor in zip(sites, passed, strict=True):
            interleaver.meet(interleaver.slots[site.site], tensor)
            assert stacks() == before
        interleaver.finish(worker)
        assert stacks() == before
    assert torch.get_default_dtype() is torch.float32
    return worker, passed


def counts(worker: Worker, sites: list[Writable]) -> object:
    with Counting() as mode:
        first = worker.read(sites[0])
        first += 1
        second = worker.read(sites[1]) + first
    return mode.count, second.tolist()


def counts_flops(worker: Worker, sites: list[Writable]) -> object:
    with FlopCounterMode(display=False) as mode:
        first = worker.read(sites[0])
        first += 1
        second = first[None] @ worker.read(sites[1])[:, None]
    return mode.get_total_flops(), second.tolist()


def leaves_one_open(worker: Worker, sites: list[Writable]) -> object:
    mode = Counting()
    mode.__enter__()
    first = worker.read(sites[0])
    first += 1
    worker.read(sites[1])
    return mode.count


def maps(worker: Worker, sites: list[Writable]) -> object:
    first = worker.read(sites[0])
    first += 1
    return torch.func.vmap(lambda i: i * worker.read(sites[1]))(torch.arange(2.0)).tolist()


def differentiates(worker: Worker, sites: list[Writable]) -> object:
    worker.read(sites[0]).add_(1)
    with torch.inference_mode(False):
        return torch.func.grad(lambda x: (x * worker.read(sites[1]) * x).sum())(torch.full((3,), 2.0)).tolist()


def in_another_dtype(worker: Worker, sites: list[Writable]) -> object:
    torch.set_default_dtype(torch.float64)
    worker.read(sites[0]).add_(1)
    worker.read(sites[1])
    return torch.ones(1).dtype


def in_inference_mode(worker: Worker, sites: list[Writable]) -> object:
    with torch.inference_mode():
        worker.read(sites[0]).add_(1)
    worker.read(sites[1])
    return None


def out_of_inference_mode(worker: Worker, sites: list[Writable]) -> object:
    with torch.inference_mode(False):
        first = worker.read(sites[0])
    first.add_(1)
    with torch.inference_mode(False):
        worker.read(sites[1])
        return torch.is_inference_mode_enabled()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("body", "returned"),
    [
        (counts, (2, [3.0] * 3)),
        (counts_flops, (6, [[6.0]])),
        (leaves_one_open, 1),
        (maps, [[0.0] * 3, [1.0] * 3]),
        (differentiates, [4.0] * 3),
        (in_another_dtype, torch.float64),
        (in_inference_mode, None),
        (out_of_inference_mode, False),
    ],
)
def test_an_edit_lands_in_whatever_mode_it_is_made(body: Any, returned: Any, inference: bool) -> None:
    """Kills: an engine that goes on in a mode of its block's, in which operations are others, or fail."""
    worker, passed = run(body, inference=inference)
    assert worker.error is None
    assert worker.returned == returned
    assert [tensor.tolist() for tensor in passed] == [[2.0] * 3, [1.0] * 3, [1.0] * 3]


def enter_and_leave_open(mode: torch.inference_mode, ends: str) -> Exception | None:
    """A block that does so, from beginning to end; what it raised."""
    worker, site = Worker(Rows(0, 0, 1)), Anywhere("a")

    def body() -> None:
        mode.__enter__()
        worker.read(site)
        assert torch.is_inference_mode_enabled()
        if ends == "raises":
            raise ValueError
        if ends == "is killed":
            worker.reach_step(5)

    worker.body = body
    interleaver = Interleaver([worker], lambda slot: None)
    interleaver.start()
    interleaver.begin(0)
    interleaver.meet(interleaver.slots[site.site], torch.ones(1))
    interleaver.close()
    return worker.error


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("ends", ["returns", "raises", "is killed"])
def test_inference_mode_that_a_block_leaves_open_is_over_with_it(ends: str, gradients: bool) -> None:
    """Kills: a guard of ours that puts the block's mode back when its worker is let go of."""
    mode = torch.inference_mode()
    with torch.set_grad_enabled(gradients):
        before = state()
        assert isinstance(enter_and_leave_open(mode, ends), ValueError) == (ends == "raises")
        gc.collect()
        assert state() == before
        assert torch.ones(2).add_(1)._version == 1  # which a tensor of inference mode has not
        mode.__exit__(None, None, None)


def fakes(worker: Worker, sites: list[Writable]) -> object:
    with FakeTensorMode():
        worker.read(sites[0])


def assigns_in_a_map(worker: Worker, sites: list[Writable]) -> object:
    def assign(i: torch.Tensor) -> torch.Tensor:
        worker.write(sites[0], i * torch.ones(3))
        return i

    return torch.func.vmap(assign)(torch.arange(2.0))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (fakes, jf.TracingError, "cannot read or write a value inside a FakeTensorMode"),
        (assigns_in_a_map, jf.EditMismatch, "a was assigned a tensor of a transform"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(body: Any, error: Any, message: str, inference: bool) -> None:
    worker, passed = run(body, inference=inference)
    assert isinstance(worker.error, error)
    assert message in str(worker.error)
    assert [tensor.tolist() for tensor in passed] == [[1.0] * 3] * 3


def profiles_across(worker: Worker, sites: list[Writable]) -> object:
    with torch.autograd.profiler.profile(use_kineto=False):
        return worker.read(sites[0])


def profiles_between(worker: Worker, sites: list[Writable]) -> object:
    first = worker.read(sites[0]).clone()
    with torch.autograd.profiler.profile(use_kineto=False):
        first += 1
    return worker.read(sites[1])


def reads(worker: Worker, sites: list[Writable]) -> object:
    return [worker.read(site) for site in sites]


def test_within_operators_no_profiler_begins_in_one_and_ends_in_another() -> None:
    """Which ends the process: the operator that goes on writes to what the profiler has let go of."""
    error = profiled_worker(profiles_across, inside=True).error
    assert isinstance(error, jf.TracingError)
    assert "between the beginning and the end of a torch profiler" in str(error)
    assert profiled_worker(profiles_between, inside=True).error is None
    assert profiled_worker(profiles_across, inside=False).error is None
    with torch.autograd.profiler.profile(use_kineto=False):
        assert profiled_worker(reads, inside=True).error is None


def profiled_worker(body: Any, *, inside: bool) -> Worker:
    worker, sites = Worker(Rows(0, 0, 1), inside_operators=inside), [Writable("a"), Writable("b")]
    worker.body = lambda: body(worker, sites)
    interleaver = Interleaver([worker], lambda slot: None)
    interleaver.start()
    interleaver.begin(0)
    for site in sites:
        interleaver.meet(interleaver.slots[site.site], torch.ones(1))
    interleaver.finish(worker)
    return worker


def test_a_block_that_closes_a_mode_of_its_engine_is_told() -> None:
    worker = Worker(Rows(0, 0, 1))
    worker.body = _pop_mode
    _push_mode(Counting())
    with pytest.raises(jf.TracingError, match="closed a mode of torch's that it had not opened"):
        Interleaver([worker], lambda slot: None).start()
    assert torch.is_grad_enabled()
