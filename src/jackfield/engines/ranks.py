"""One model on several ranks: the process that asks leads, the others follow it.

Each rank holds its part of the model. A follower does what the leader does: a method of the model, called on all alike.
Blocks run beside the leader alone. All have to join the parts of a value that a block waits for, so the leader says
where blocks wait, and after each meeting what was edited, and where they wait now. Not for what a rank holds, or how
parts are joined: a model knows that.
"""

import contextlib
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from greenlet import getcurrent
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, says its documentation

from jackfield.engines.inline import InlineTap, Tap, site_of
from jackfield.errors import EngineDied, InvalidRequest, JackfieldError, Unavailable
from jackfield.interleave.site import Site

Recipe = Callable[[torch.device], Any]
"""Makes a rank's part of a model, on a device. Followers get it pickled."""
NEVER = timedelta(days=365)  # a follower waits for as long as its leader has nothing to say; its death is seen at once
_PROGRAM = "import sys; sys.path[:] = {path!r}; from jackfield.engines.ranks import serve; serve()"


class Word(IntEnum):
    """What a leader says."""

    CALL = 0  # a method follows
    MET = 1  # what became of a value that passed follows
    ABORT = 2  # the call has ended in an error, where a value passed
    END = 3


class Aborted(Exception):
    """What a follower was doing has ended at its leader's."""


class Ended(Exception):
    """There is no more to do."""


class Taps(Protocol):
    """What is asked of a model: that values can be listened to."""

    def listen(self, tap: Tap | None) -> None: ...


class Ranks:
    """The ranks that share a model: torch.distributed's default group, gloo on CPUs and NCCL on GPUs."""

    def __init__(self, device: torch.device, processes: Sequence["subprocess.Popen[bytes]"] = ()) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._caller: object = None  # the greenlet in which a call runs: a block's own call, or the engine's
        self._aborted = False
        self._processes = processes
        self._model: Taps | None = None
        self._listening: InlineTap | None = None
        self._tap = FollowerTap(self)

    @classmethod
    def started(cls, size: int, device: torch.device, recipe: Recipe) -> "Ranks":
        """This process as the leader of `size` ranks, the others in processes of their own."""
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        processes = [_started(rank, size, store.port, device, recipe) for rank in range(1, size)]
        try:
            _await(store, processes)
            _join(device, store=store, rank=0, world_size=size)
        except BaseException:
            _end(processes)
            raise
        return cls(_device_of(device, 0), processes)

    @classmethod
    def of_torchrun(cls, device: torch.device) -> "Ranks":
        """This process as one of those that `torchrun` has started on this machine."""
        _join(device)
        return cls(_device_of(device, dist.get_rank()))

    # -- the leader

    def lead(self, model: Taps) -> None:
        """Calls go to `model` here, and to the followers' parts."""
        self._model = model

    def call(self, method: str, *args: Any) -> Any:
        """`model.method(*args)` on every rank; what it gives here. EngineDied where a follower has ended."""
        waited = frozenset[Site]() if self._listening is None else self._listening.waited
        self.tell(Word.CALL, (method, [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args], waited))
        before, self._caller, self._aborted = self._caller, getcurrent(), False
        try:
            return getattr(self._model, method)(*args)
        except JackfieldError:
            raise  # on all ranks alike
        except BaseException:
            if not self._aborted:  # between two values: nobody knows where the others are
                self.close()
            raise
        finally:
            self._caller = before

    def check_call(self) -> None:
        """Unavailable where a block runs a module itself, of which every rank would have to run its part."""
        if self._caller is not getcurrent():
            raise Unavailable(f"A module runs on all of its {self.size} ranks or on none: a block cannot call it here.")

    def listen(self, tap: InlineTap | None) -> None:
        """Has values handed to `tap`, which is the leader's."""
        if self._model is None:
            return
        self.tell(Word.CALL, ("listen", [tap is not None], frozenset[Site]()))
        self._listening = tap
        self._model.listen(None if tap is None else LeaderTap(self, tap))

    def tell(self, word: Word, message: object = None) -> None:
        """A word to all, and what goes with it. EngineDied where a follower has ended."""
        if self._model is None:
            raise EngineDied("The ranks of this model have ended: load it again.")
        self._aborted = self._aborted or word is Word.ABORT
        try:
            dist.broadcast_object_list([(word, message)], 0, device=torch.device("cpu"))
        except RuntimeError as error:
            raise EngineDied("A rank of this model has ended: close it, and load it again.") from error

    def close(self) -> None:
        """Ends the followers, and the group."""
        if not dist.is_initialized():
            return
        with contextlib.suppress(EngineDied):
            self.tell(Word.END)
        self._model = None
        dist.destroy_process_group()
        _end(self._processes)

    # -- a follower

    def follow(self, model: Taps) -> NoReturn:
        """Does what the leader does until that ends; then raises Ended."""
        self._model = model
        try:
            with torch.no_grad():
                while True:
                    with contextlib.suppress(Aborted):
                        self.hear()
        except RuntimeError as error:  # the leader's process has ended
            raise Ended from error
        finally:
            dist.destroy_process_group()

    def hear(self) -> Any:
        """What became of a value that passes; calls are answered on the way."""
        while True:
            heard: list[Any] = [None]
            dist.broadcast_object_list(heard, 0, device=torch.device("cpu"))
            word, message = heard[0]
            if word is Word.CALL:
                self._answer(*message)
            elif word is Word.MET:
                return message
            else:
                raise Aborted if word is Word.ABORT else Ended

    def _answer(self, method: str, args: Sequence[Any], waited: frozenset[Site]) -> None:
        assert self._model is not None
        self._tap.waited = waited
        if method == "listen":
            self._model.listen(self._tap if args[0] else None)
            return
        given = [arg.to(self.device) if isinstance(arg, Tensor) else arg for arg in args]
        with contextlib.suppress(JackfieldError):  # the leader's own call raises the same
            getattr(self._model, method)(*given)


class LeaderTap:
    """The leader's tap, which tells the others what becomes of each value."""

    def __init__(self, ranks: Ranks, tap: InlineTap) -> None:
        self._ranks, self._tap = ranks, tap

    def listens(self, name: str, layer: int | None) -> bool:
        return self._tap.listens(name, layer)

    def operands(self, tensors: Mapping[str, Tensor], layer: int | None) -> Mapping[str, Tensor]:
        try:
            taken = dict(self._tap.operands(tensors, layer))
        except BaseException:
            self._ranks.tell(Word.ABORT)
            raise
        edited = [name for name in tensors if taken[name] is not tensors[name]]
        self._ranks.tell(Word.MET, (edited, self._tap.waited))
        for name in edited:
            taken[name] = taken[name].contiguous()
            dist.broadcast(taken[name], 0)
        return taken


class FollowerTap:
    """A follower's: what blocks wait for beside the leader, and what they made of it there."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.waited = frozenset[Site]()

    def listens(self, name: str, layer: int | None) -> bool:
        return site_of(name, layer) in self.waited

    def operands(self, tensors: Mapping[str, Tensor], layer: int | None) -> Mapping[str, Tensor]:
        edited, self.waited = self._ranks.hear()
        taken = dict(tensors)
        for name in edited:
            taken[name] = torch.empty_like(tensors[name], memory_format=torch.contiguous_format)
            dist.broadcast(taken[name], 0)
        return taken


def serve() -> None:
    """A follower's process: what it is to do comes in on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader
    rank, size, port, device, threads, recipe = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    store.set(f"rank {rank}", "here")
    _join(device, store=store, rank=rank, world_size=size)
    ranks = Ranks(_device_of(device, rank))
    with contextlib.suppress(JackfieldError, Ended):  # the leader says what is wrong, or has ended
        ranks.follow(recipe(ranks.device))


def refuse_others(size: int) -> None:
    """InvalidRequest where torch.distributed has ranks in this process: a model's parts would be joined with those.

    A group of one, as vLLM makes it, joins nothing; it is in the way of `size` ranks of our own alone.
    """
    if dist.is_available() and dist.is_initialized() and (size > 1 or dist.get_world_size() > 1):
        raise InvalidRequest(
            "torch.distributed has a group in this process already: close the model that has several ranks first, or "
            "let `torchrun -m jackfield` start the ranks."
        )


def _started(rank: int, size: int, port: int, device: torch.device, recipe: Recipe) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM.format(path=sys.path)], stdin=subprocess.PIPE)
    assert process.stdin is not None
    pickle.dump((rank, size, port, device, torch.get_num_threads(), recipe), process.stdin)
    process.stdin.close()
    return process


def _await(store: TCPStore, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Until every follower is there. EngineDied where one has ended on the way."""
    for rank, process in enumerate(processes, 1):
        while not store.check([f"rank {rank}"]):
            if process.poll() is not None:
                raise EngineDied(f"Rank {rank} ended while it began, with status {process.returncode}.")
            time.sleep(0.05)


def _join(device: torch.device, **place: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(_device_of(device, place.get("rank", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=NEVER, **place)


def _device_of(device: torch.device, rank: int) -> torch.device:
    return torch.device("cuda", rank) if device.type == "cuda" else device


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
