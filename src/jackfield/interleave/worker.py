"""One block running beside one request: what it waits for, what it was handed, what it hands back.

The block runs in a greenlet of the engine's thread. Reading a value that has not come parks it; the engine resumes it
when the tensor passes. What it was handed are private copies. When it moves on, those it changed (their version
counters say so) are written back, and the rest are forgotten but for a weak reference, by which a change that comes
too late is found.
"""

import contextvars
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, cast

import greenlet
import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch._C._dynamo.eval_frame import set_eval_frame

from jackfield.errors import EditMismatch, NotReached, OutOfOrder
from jackfield.interleave.channel import WHOLE, Channel, Selection, Slot
from jackfield.interleave.held import MANY, Held, HeldNest
from jackfield.interleave.modes import BlockModes, is_dual, is_of_transform
from jackfield.interleave.nest import tensors
from jackfield.interleave.step import Rows

if TYPE_CHECKING:
    from jackfield.interleave.interleaver import Interleaver


AnyHeld = Held | HeldNest


CHANGED: Final = attrgetter("changed")  # of an AnyHeld; `filter` makes no function of it at each read
READ_ONLY: Final = "{name} can be read only, and was changed in place: clone it for scratch."
_LEVELS: Final = 64  # of a C frame each: torch walks back over as many and a few, and there are some above these


def _from_the_block(error: Exception) -> Exception:
    """The error without the frame that called the block: a cycle through the worker would keep tensors alive."""
    trace = error.__traceback__
    return error.with_traceback(None if trace is None else trace.tb_next)


def _refuse_dual(channel: Channel, value: Any) -> None:
    if any(is_dual(tensor) for tensor in tensors(value)):
        raise EditMismatch(
            f"{channel.name} was given a dual tensor of forward-mode derivatives, whose tangent would go through the "
            "model: give it the primal of `torch.autograd.forward_ad.unpack_dual`."
        )


def _far_from_the_base(run: Callable[[None], None]) -> Callable[[object], None]:
    """`run(None)`, with so many C frames below it that nobody who walks back comes to the greenlet's base.

    torch's errors note the 64 innermost frames where they are raised. Behind the base of a greenlet the stack holds
    whatever runs the engine now, and not what started the block: a walk that gets there ends the process, by luck of
    what lies there. These frames are C's alone and show in no traceback; each is 32 bytes, for all are copied at every
    switch.
    """
    levels: Iterator[None] = map(run, (None,))
    for _ in range(_LEVELS):
        levels = itertools.chain(levels)
    return cast("Callable[[object], None]", functools.partial(next, levels))


class _BlockGreenlet(greenlet.greenlet):
    worker: "Worker"


class Worker:
    """One block beside one request."""

    def __init__(self, rows: Rows, batch_size: int = 1, *, inside_operators: bool = False) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.interleaver: Interleaver
        self.owner: object = None  # the engine whose parts the block may read
        self.body: Callable[[], Any] = lambda: None
        self.step = 0  # the step whose values the block reads
        self.slot: Slot | None = None
        self.wanted = ""
        self.awaited: Channel | None = None  # the channel whose whole value it waits for at its slot
        self.waiting_step = -1
        self.passing: Any = None
        self.done = False
        self._stopped = False
        self.error: Exception | None = None
        self.interrupt: BaseException | None = None
        self.returned: Any = None
        self.finalize: Callable[[], None] = lambda: None
        self._held: list[AnyHeld] = []
        self._past: list[AnyHeld] = []  # what the block has moved past
        self._shown: dict[str, tuple[Tensor, int]] = {}  # in this step, each with the version that it was given with
        self._many = MANY  # of them, after which they are looked at
        self._modes = BlockModes(inside_operators=inside_operators)
        self._engine: greenlet.greenlet
        self._greenlet = _BlockGreenlet(_far_from_the_base(self._run))
        self._greenlet.worker = self
        self._greenlet.gr_context = contextvars.copy_context()

    @staticmethod
    def current() -> "Worker | None":
        """The worker whose block is running now, in this thread."""
        return getattr(greenlet.getcurrent(), "worker", None)

    @property
    def stopped(self) -> bool:
        """Whether the request ends after the step that goes on."""
        return self._stopped

    def stop(self) -> None:
        """Ends the request after this step."""
        self._stopped = True

    # -- the engine's side

    def resume(self, message: Any) -> None:
        """Runs the block until it waits again, or has ended. Raises what interrupted it."""
        self._run_on(self._greenlet.switch, message)

    def throw(self, error: BaseException) -> None:
        """Raises `error` in the block, where it waits, and runs it until it waits again."""
        self._run_on(self._greenlet.throw, error)

    def _run_on(self, switch: Callable[[Any], object], given: Any) -> None:
        self._engine = self._greenlet.parent = greenlet.getcurrent()  # the block goes back to whoever runs it on
        compiling = set_eval_frame(None)  # the engine: the block's frames are none of what it has compiled
        try:
            switch(given)
        finally:
            set_eval_frame(compiling)
            if self.interrupt is not None:
                raise self._interrupt_taken()

    def _interrupt_taken(self) -> BaseException:
        """What interrupted the block, to be raised: its traceback leads to this worker, which does not keep it."""
        interrupt, self.interrupt = self.interrupt, None
        assert interrupt is not None
        try:
            return interrupt
        finally:
            del interrupt

    def kill(self) -> None:
        """Ends a block that is still running; its `finally` clauses run."""
        self.done = True
        if self._greenlet and not self._greenlet.dead:
            self.throw(greenlet.GreenletExit())
        self._held.clear()
        self.passing = None
        vars(self._greenlet).pop("worker", None)  # the cycle that would keep this worker
        self.body = self.finalize = lambda: None

    def _run(self, _: None) -> None:
        self._modes.arrive()
        try:
            with self._modes.own():
                self.returned = self.body()
            self._move_on()
            self._check_shown()
            self._look_back()
            self.finalize()
        except greenlet.GreenletExit:  # `kill` ended it: nobody asks what became of it
            pass
        except Exception as error:
            self.error = _from_the_block(error)
        except BaseException as error:
            self.interrupt = error
        finally:
            if self.slot is not None and self in self.slot.workers:
                self.slot.workers.remove(self)
            self.done, self.slot, self.passing = True, None, None
            self._held.clear()
            self._past.clear()
            self._shown.clear()
            self._modes.depart()

    # -- the block's side

    def show(self, name: str, value: Tensor) -> Tensor:
        """The copy of what is known in the block's step, and is read only: that it was not changed is seen to later."""
        if name not in self._shown:
            with torch.inference_mode(False):  # a tensor born in it has no version counter
                copy = value.clone()
            self._shown[name] = copy, copy._version
        return self._shown[name][0]

    def read(self, channel: Channel, selection: Selection = WHOLE) -> Any:
        """The value of `channel` in the block's step: waits for it, and hands out a private copy."""
        with self._modes:
            self._reach(channel, selection)
            if self._held:
                self._settle()  # before it is known what is held: of what was changed, other copies are out of date
                held = self._holding(channel, selection)
                if held is not None:
                    return held.value
            value = self._copy(channel, selection)
            held = (Held if isinstance(value, Tensor) else HeldNest)(channel, selection, value, self.step)
            self._held.append(held)
            if is_grad_enabled() and channel.writable and held.requires_grad:
                self._put(channel, selection, value)  # the model goes on from the copy: what follows depends on it
            return value

    def write(self, channel: Channel, value: Any, selection: Selection = WHOLE) -> None:
        """Puts `value` in the place of what passes at `channel`."""
        if not channel.writable:
            raise EditMismatch(f"{channel.name} can be read only.")
        if any(is_of_transform(tensor) for tensor in tensors(value)):
            raise EditMismatch(
                f"{channel.name} was assigned a tensor of a transform of torch.func (vmap, grad), which the model "
                "cannot go on with: assign what the transform returns."
            )
        _refuse_dual(channel, value)
        with self._modes:
            self._reach(channel, selection)
            held = self._holding(channel, selection)
            if held is not None and held.value is value:
                return  # `x.value += y`: the edit was made in place, and is seen when the block moves on
            self._settle()
            channel.check(held.value if held is not None else self._copy(channel, selection), value)
            self._put(channel, selection, self._given(value))
            self._forget(channel.memory)

    def _given(self, value: Any) -> Any:
        """What the block assigned, to be written: it may change it as soon as it runs on."""
        return value

    def _reach(self, channel: Channel, selection: Selection) -> None:
        """Waits until `channel`'s site passes in the block's step; `selection` is what is wanted of it."""
        interleaver = self.interleaver
        slot = interleaver.slots[channel.site]
        if self.passing is not None:
            if slot is self.slot and self.waiting_step == self.step:
                return
            self._move_on()
        now = interleaver.step
        if self.step < now or (self.step == now and slot.passed == interleaver.clock):
            raise OutOfOrder(self._too_late(channel.name))
        if not slot.open:
            interleaver.open(slot)
        self.slot, self.wanted, self.waiting_step = slot, channel.name, self.step
        self.awaited = channel if selection is WHOLE else None
        if self.step == now:
            slot.workers.append(self)
        self.passing = self._wait()

    def reach_step(self, step: int) -> bool:
        """Waits until `step` begins; False when the request ends before."""
        with self._modes:
            self._move_on()
            self._check_shown()
            now = self.interleaver.step
            if step < now:
                raise OutOfOrder(f"Step {step} was asked for in step {now}: steps come in order, once.")
            self.step = step
            return step == now or self._wait_for_step()

    def await_step(self) -> None:
        """Waits until the block's step has begun, without leaving the site it stands at."""
        if self.step > self.interleaver.step:
            with self._modes:
                self._move_on()
                is_there = self._wait_for_step()
            if not is_there:
                raise NotReached(f"Step {self.step} never came: the request ended after step {self.interleaver.step}.")
        elif self.step < self.interleaver.step:
            raise OutOfOrder(self._too_late(f"step {self.step}"))

    def _move_on(self) -> None:
        """Leaves the site the block stands at: what it changed goes back to the model."""
        if self.passing is None:
            return
        self._settle()
        for held in self._held:
            held.let_go()
        self._past += self._held
        self._held = []
        self.passing = None
        if len(self._past) > self._many:
            self._look_back()

    def _wait_for_step(self) -> bool:
        self.slot, self.wanted, self.waiting_step = None, f"step {self.step}", self.step
        return bool(self._wait())

    def _wait(self) -> Any:
        """Until the engine runs the block on."""
        if self.done:
            raise greenlet.GreenletExit  # it is being ended, and asks for something in a `finally`
        self._modes.depart()
        try:
            return self._engine.switch()
        finally:
            self._modes.arrive()

    @contextmanager
    def aside(self) -> Generator[None]:
        """In which what the block asks for is computed as if it had set no mode of torch's."""
        with self._modes:
            yield

    def _copy(self, channel: Channel, selection: Selection) -> Any:
        if not is_inference_mode_enabled():
            return channel.read(self.passing, self, selection)
        with torch.inference_mode(False), torch.no_grad():  # a tensor born in it has no version counter
            return channel.read(self.passing, self, selection)

    def _put(self, channel: Channel, selection: Selection, value: Any) -> None:
        channel.write(self.passing, self, selection, value)

    def _settle(self) -> None:
        """Writes back what was changed; other copies of the same memory are then out of date, and left behind."""
        changed: list[AnyHeld] = list(filter(CHANGED, self._held))
        if not changed:
            return
        for one, two in itertools.combinations(changed, 2):
            if one.channel.memory == two.channel.memory and one.selection.meets(two.selection):
                names = " and ".join(dict.fromkeys((one.channel.name, two.channel.name)))
                raise EditMismatch(
                    f"{names}: two copies of the same numbers were both changed in place, and one change would undo "
                    "the other. Change one, and then read the other."
                )
        for held in changed:
            self._write_back(held)
        for held in changed:
            self._forget(held.channel.memory, but=changed)

    def _forget(self, memory: str, but: Sequence[AnyHeld] = ()) -> None:
        for held in list(self._held):
            if held.channel.memory == memory and held not in but:
                held.let_go()
                self._past.append(held)
                self._held.remove(held)

    def _holding(self, channel: Channel, selection: Selection) -> AnyHeld | None:
        for held in self._held:  # few: what was read of one site
            if held.channel is channel and held.selection == selection:
                return held
        return None

    def _write_back(self, held: AnyHeld) -> None:
        channel = held.channel
        if held.reshaped is not None:
            shape, other = held.reshaped
            raise EditMismatch(f"{channel.name} has shape {tuple(shape)}, and was changed in place to {tuple(other)}.")
        if not channel.writable:
            raise EditMismatch(READ_ONLY.format(name=channel.name))
        _refuse_dual(channel, held.value)
        self._put(channel, held.selection, held.value)
        held.settled()

    def _check_shown(self) -> None:
        shown, self._shown = self._shown, {}
        for name, (tensor, version) in shown.items():
            if tensor._version != version:
                raise EditMismatch(READ_ONLY.format(name=name))

    def _look_back(self) -> None:
        """Refuses a change of what the block has moved past, and forgets the copies that nobody has any more.

        At the block's end, and when as many have come again as were kept the last time: each is looked at a few times,
        however many steps there are.
        """
        for past in self._past:
            if past.changed:
                self._past, name = [], past.channel.name
                raise OutOfOrder(
                    f"{name} of step {past.step} was changed in place after the block had moved past it, so the change "
                    "could not reach the model. Change it before the next read, or `.clone()` it for scratch."
                )
        self._past = [past for past in self._past if past.anywhere]
        self._many = 2 * len(self._past) + MANY

    def _too_late(self, name: str) -> str:
        stood = self.slot is not None and self.waiting_step <= self.interleaver.step
        at = f", and the block has moved on to {self.wanted} of step {self.waiting_step}" if stood else ""
        return f"{name} of step {self.step} has gone by{at}. Read values in the order of the forward pass."
