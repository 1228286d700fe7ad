"""Listening to transformers' attention interface while a run wants attention values.

Models look their attention function up by name at each call, in a table (`ALL_ATTENTION_FUNCTIONS`). For the time of
a run the table's look-up is wrapped: what it gives for this run's attention modules tells the tap first. The model's
configuration, its masks and every branch that compares the implementation's name stay as they are, and what runs is
what the model would have run. Modules of other models, and of other threads, get exactly what they asked for.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

AttentionFunction = Callable[..., tuple[Tensor, Any]]

PLAIN = "_jackfield_plain"  # in a wrapped table: what it had of its own


class Dispatched(Protocol):
    """What a run does with a call of the interface."""

    def dispatch(
        self,
        function: AttentionFunction,
        implementation: str | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Any]: ...


class Switchboard:
    """The taps of every run in this process, and the wrapped tables. One per process; it holds nothing between runs."""

    def __init__(self) -> None:
        self._taps: dict[nn.Module, Dispatched] = {}
        self._tables: dict[int, tuple[AttentionInterface, set[nn.Module]]] = {}
        self._lock = threading.Lock()
        self._runs: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()

    def turn(self, model: nn.Module) -> threading.Lock:
        """The lock that whoever runs blocks beside this model holds: gates of two runs would take each other down."""
        with self._lock:
            return self._runs.setdefault(model, threading.Lock())

    def connect(self, taps: Mapping[nn.Module, Dispatched]) -> None:
        """Hears the calls of these modules, until `disconnect`."""
        with self._lock:
            self._taps.update(taps)
            for table in _tables(taps):
                self._tables.setdefault(id(table), (table, set()))[1].update(taps)
                if PLAIN not in vars(table):
                    self._wrap(table)

    def disconnect(self, taps: Mapping[nn.Module, Dispatched]) -> None:
        """Hears them no longer. May be done again, or after half of a `connect`, where an interrupt ended it."""
        with self._lock:
            for module in taps:
                self._taps.pop(module, None)
            for table, heard in list(self._tables.values()):
                heard.difference_update(taps)
                if not heard:
                    _unwrap(table)
                    del self._tables[id(table)]

    def _wrap(self, table: AttentionInterface) -> None:
        local: dict[str, AttentionFunction] = vars(table)["_local_mapping"]
        plain = type(table)()
        vars(plain)["_local_mapping"] = local

        def get_interface(attn_implementation: str, default: AttentionFunction) -> AttentionFunction:
            found = cast("AttentionFunction", plain.get_interface(attn_implementation, default))
            return self._heard(found, attn_implementation)

        # Code that indexes the table does not ask for eager there: its own function is called without a look-up.
        known = cast("Mapping[str, AttentionFunction]", plain)
        heard = {name: self._heard(function, name) for name, function in known.items()}
        vars(table).update(_local_mapping={**local, **heard}, get_interface=get_interface, **{PLAIN: local})

    def _heard(self, function: AttentionFunction, implementation: str | None) -> AttentionFunction:
        taps = self._taps

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            tap = taps.get(module)
            if tap is None:
                return function(module, *args, **kwargs)
            return tap.dispatch(function, implementation, module, args, kwargs)

        return attend


def _unwrap(table: AttentionInterface) -> None:
    own = vars(table)
    if PLAIN in own:
        own["_local_mapping"] = own[PLAIN]
        own.pop("get_interface", None)
        del own[PLAIN]  # last: until then it is seen to be wrapped


def _tables(taps: Mapping[nn.Module, Dispatched]) -> list[AttentionInterface]:
    """The tables that the code of these modules looks functions up in."""
    names = {base.__module__ for module in taps for base in type(module).__mro__ if base is not object}
    found: dict[int, AttentionInterface] = {}
    for name in names:
        for item in vars(sys.modules[name]).values() if name in sys.modules else ():
            if isinstance(item, AttentionInterface):
                found[id(item)] = item
    return list(found.values())


SWITCHBOARD = Switchboard()  # the tables are the process's, and so is what counts who listens to them
