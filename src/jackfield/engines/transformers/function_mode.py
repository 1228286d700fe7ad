"""A torch function mode that hears one greenlet, and how to run code that no such mode hears.

Torch keeps its stack of function modes per thread, and all greenlets of a thread share it. A mode of ours therefore
lets the calls of any greenlet but the one that entered it through, and takes its fellows off the stack while it calls
back. Inside its own `__torch_function__` torch has already taken it off itself.
"""

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import greenlet
from torch.overrides import (  # the stack itself has no public name (torch 2.6 to 2.13)
    TorchFunctionMode,
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _pop_mode,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _push_mode,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from jackfield.engines.transformers.tape import Function


class ListeningMode(TorchFunctionMode):
    """Abstract. `hear` makes each call of torch's that the greenlet which entered the mode makes inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._greenlet: greenlet.greenlet | None = None

    @abstractmethod
    def hear(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of `function(*args, **kwargs)`, or another in its place."""

    def __enter__(self) -> Self:
        self._greenlet = greenlet.getcurrent()
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        # Not the topmost: a greenlet that was resumed in between may wait inside a mode of its own.
        _set_modes([mode for mode in _modes() if mode is not self])

    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if greenlet.getcurrent() is not self._greenlet:
            return func(*args, **(kwargs or {}))
        return self.hear(func, args, kwargs or {})


@contextmanager
def unheard() -> Generator[None]:
    """The thread's function modes without any of ours; afterwards as they were, whatever was left among them.

    Code run here may switch to a greenlet that waits inside a mode of its own (`with torch.device(...)`).
    """
    before = _modes()
    _set_modes([mode for mode in before if not isinstance(mode, ListeningMode)])
    try:
        yield
    finally:
        _set_modes(before)


def _modes() -> list[TorchFunctionMode]:
    return _get_current_function_mode_stack()


def _set_modes(modes: Sequence[TorchFunctionMode]) -> None:
    current = _modes()
    if current == modes:
        return
    for _ in current:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
