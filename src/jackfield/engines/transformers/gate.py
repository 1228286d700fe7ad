"""A look before and after a module's forward, while a block runs beside it.

A gate is put on the instance, in the place of `forward`, and costs a third of a microsecond when nobody waits: a
forward hook would send the module down torch's slow path, and one put up while the module already runs is never
called. What block code itself runs, and what other threads run, goes through untouched.

A module with forward hooks of somebody else's gives what these leave of its result: there the look after it is a hook
too, the last.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, cast

from greenlet import getcurrent
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from jackfield.errors import Unavailable
from jackfield.interleave.channel import Slot, Slots
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port, Site

Around = Callable[["Call"], AbstractContextManager[Any] | None]
Change = Callable[[Any], Any]

# Those that follow, or precede, every module there is.
AFTER_ALL = cast("dict[int, object]", torch_module._global_forward_hooks)  # pyright: ignore[reportPrivateUsage]
BEFORE_ALL = cast("dict[int, object]", torch_module._global_forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]


class Call:
    """The arguments and the result of one call of a module, as they pass."""

    __slots__ = ("args", "gate", "kwargs", "output")

    def __init__(self, gate: "Gate", args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        self.gate, self.args, self.kwargs, self.output = gate, args, kwargs, output

    def argument(self, key: int | str | None) -> Any:
        """The argument `key`: by position, by name, or the first; one that was not passed is None."""
        place = self._place(key)
        if isinstance(place, int):
            return self.args[place] if place < len(self.args) else None
        return self.kwargs.get(place)

    def replace_argument(self, key: int | str | None, new: Any) -> None:
        """Puts `new` where the argument was passed."""
        place = self._place(key)
        if isinstance(place, int) and place < len(self.args):
            self.args = (*self.args[:place], new, *self.args[place + 1 :])
        else:
            self.kwargs = {**self.kwargs, str(place): new}

    def result(self, key: int | str | None) -> Any:
        """The result, or its item `key`; None picks the result itself, or its first item where that is a tuple."""
        if key is None:
            return self.output if isinstance(self.output, Tensor) else self.output[0]
        return self.output[key]

    def tensor(self, site: Site) -> Tensor:
        """The tensor at one of this module's sites."""
        if site.key is None and site.port is Port.OUTPUT and isinstance(self.output, Tensor):
            return self.output
        found = self.argument(site.key) if site.port is Port.INPUT else self.result(site.key)
        if not isinstance(found, Tensor):
            raise Unavailable(f"{site} holds a {type(found).__name__} in this call, not a tensor.")
        return found

    def _place(self, key: int | str | None) -> int | str:
        names = parameters(type(self.gate.module))
        if key is None:
            key = 0 if self.args else next((name for name in names if name in self.kwargs), next(iter(self.kwargs), 0))
        if isinstance(key, int):
            if key < len(self.args) or key >= len(names):
                return key
            return names[key]
        if key in self.kwargs or key not in names:
            return key
        return names.index(key) if names.index(key) < len(self.args) else key


@lru_cache(maxsize=4096)
def parameters(module_class: type[nn.Module]) -> tuple[str, ...]:
    """The names of a forward's positional parameters, without self."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(module_class.forward)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)[1:]


class Extras:
    """What a run wants of a gate beside its two slots."""

    __slots__ = ("around", "changes", "hook", "keep_output", "kept", "left", "on_enter", "on_leave")

    def __init__(self) -> None:
        self.hook: RemovableHandle | None = None  # where other hooks follow the module: ours, after them
        self.left: Call | None = None  # then: the call that they follow
        self.changes: list[Change] = []  # then: what the output goes through first
        self.around: Around | None = None
        self.keep_output = False
        self.kept: Any = None
        self.on_enter: Callable[[Call], None] | None = None
        self.on_leave: Callable[[Call], None] | None = None


class Gate:
    """The gate of one module: up in a run, away after it, and kept for the next."""

    def __init__(self, module: nn.Module, path: str, slots: Slots) -> None:
        self.module, self.path = module, path
        self.before, self.after = slots[Site(path, Port.INPUT)], slots[Site(path, Port.OUTPUT)]
        self._extras: Extras | None = None
        self._interleaver: Interleaver | None = None  # elsewhere than at its home, and without one, calls go through
        self._replaced: Any = None
        self._forward: Callable[..., Any] = module.forward
        self._gated = self._made(self.after)

    @property
    def extras(self) -> Extras:
        """What else is wanted, of this run alone."""
        if self._extras is None:
            self._extras = Extras()
        return self._extras

    def put_up(self, interleaver: Interleaver) -> None:
        """Puts the gate in its module's way. Whoever is to close it knows of it before: an interrupt may follow."""
        own = self.module.__dict__
        self._replaced, self._forward = own.get("forward"), self.module.forward
        self.before.open = self.after.open = True
        self._interleaver = interleaver  # from here on there is something to put back
        if own["_forward_hooks"] or AFTER_ALL:
            self.extras.hook = self.module.register_forward_hook(self._follow)
            own["forward"] = self._made(Slot(self.after.site))  # nobody waits there
        else:
            own["forward"] = self._gated

    @property
    def is_plain(self) -> bool:
        """Whether the module computes what its class says: it has no hooks, and no other `forward` was put on it."""
        own = self.module.__dict__
        hooks = (own["_forward_hooks"], own["_forward_pre_hooks"], AFTER_ALL, BEFORE_ALL)
        return not any(hooks) and (own.get("forward") if self._interleaver is None else self._replaced) is None

    def change_output(self, change: Change) -> None:
        """Has what the module gives go through `change` first, while the gate is up."""
        if self.extras.hook is not None:
            self.extras.changes.append(change)
            return
        forward = self._forward
        self._forward = lambda *args, **kwargs: change(forward(*args, **kwargs))

    def close(self) -> None:
        """Takes the gate away: the module is as it was. May be done again, where an interrupt ended it."""
        if self._interleaver is None:
            return
        if self._extras is not None and self._extras.hook is not None:
            self._extras.hook.remove()
        if self._replaced is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._replaced
        self._forward, self._extras = self.module.forward, None
        self.before.open = self.after.open = False
        self._interleaver = None

    def _made(self, after: Slot) -> Callable[..., Any]:
        before = self.before

        def gated(*args: Any, **kwargs: Any) -> Any:
            interleaver, extras = self._interleaver, self._extras
            if interleaver is None or getcurrent() is not interleaver.home:
                return self._forward(*args, **kwargs)
            if extras is not None and extras.on_enter is not None:
                extras.on_enter(Call(self, args, kwargs))
            before.passed = interleaver.clock
            if before.workers:
                call = Call(self, args, kwargs)
                interleaver.meet(before, call)
                args, kwargs = call.args, call.kwargs
            extras = self._extras  # a block may have come to want some
            output = self._forward(*args, **kwargs) if extras is None else self._listened(extras, args, kwargs)
            after.passed = interleaver.clock
            if after.workers:
                call = Call(self, args, kwargs, output)
                interleaver.meet(after, call)
                output = call.output
            if self._extras is not None:
                self._leave(self._extras, Call(self, args, kwargs, output))
            return output

        # generate reads the signature of the model's forward, which is the class's unless it was replaced for good.
        gated.__dict__["__wrapped__"] = self._forward
        return gated

    def _listened(self, extras: Extras, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        listener = None if extras.around is None else extras.around(Call(self, args, kwargs))
        if listener is None:
            return self._forward(*args, **kwargs)
        with listener:
            return self._forward(*args, **kwargs)

    def _follow(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The look after a module, behind the hooks that follow it. None, as a hook's result, changes nothing."""
        interleaver, extras = self._interleaver, self._extras
        if interleaver is None or extras is None or extras.left is None or getcurrent() is not interleaver.home:
            return None
        call, extras.left = extras.left, None
        for change in extras.changes:
            output = change(output)
        call.output, self.after.passed = output, interleaver.clock
        if self.after.workers:
            interleaver.meet(self.after, call)
        _leave(extras, call)
        return call.output

    @staticmethod
    def _leave(extras: Extras, call: Call) -> None:
        if extras.hook is not None:
            extras.left = call  # other hooks come first
        else:
            _leave(extras, call)


def _leave(extras: Extras, call: Call) -> None:
    if extras.keep_output:
        extras.kept = call.output
    if extras.on_leave is not None:
        extras.on_leave(call)
