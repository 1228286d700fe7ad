"""The torch modes of a block: greenlets share those of their thread, so each hand-over puts them away and back."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch._C import (
    _is_any_autocast_enabled,  # pyright: ignore[reportPrivateUsage]
    _len_torch_function_stack,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _set_grad_enabled,  # pyright: ignore[reportPrivateUsage]
)
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]

_Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # of each kind of device: whether it is on, and to what


class BlockModes:
    """What a block has set of torch's thread-wide modes, while it waits.

    Gradients on or off, inference mode, autocast, and function modes (`with torch.device(...)`): the engine finds its
    own as it left them, and the block its own. A block starts with the autocast that its trace stands in.
    """

    def __init__(self) -> None:
        self._grad_enabled = False
        self._functions: list[TorchFunctionMode] = []
        self._autocast: _Autocast | None = None  # None: off, which is most of the time, and costs one question
        self._off = _disabled(_autocast())
        self._began = False
        self._engine = (False, False, False, 0)  # gradients, inference mode, autocast of any kind, function modes
        self._alike: tuple[bool, bool, bool, int] | None = None  # the same of both sides, with nothing to hand over
        self._engine_autocast: _Autocast | None = None
        self._guard: torch.inference_mode | None = None

    def enter(self) -> None:
        """The block runs on."""
        engine = (  # as in `leave`; a function for both would be called twice at every read
            is_grad_enabled(),
            is_inference_mode_enabled(),
            _is_any_autocast_enabled(),
            _len_torch_function_stack(),
        )
        if engine == self._alike:
            return
        self._engine, self._alike = engine, None
        if engine[2] or self._autocast is not None:
            self._engine_autocast = autocast = _autocast()
            if self._began:
                _change_autocast(autocast, self._autocast or _disabled(autocast))
        else:
            self._engine_autocast = None
        if self._guard is not None:
            self._guard.__exit__(None, None, None)  # pyright: ignore[reportUnknownMemberType]
            self._guard = None
        for mode in reversed(self._functions):
            _push_mode(mode)
        if self._grad_enabled != is_grad_enabled():
            _set_grad_enabled(self._grad_enabled)

    def leave(self) -> None:
        """The block waits, or has ended."""
        own = (
            is_grad_enabled(),
            is_inference_mode_enabled(),
            _is_any_autocast_enabled(),
            _len_torch_function_stack(),
        )
        if own == self._alike:
            return
        grad_enabled, _, autocast, depth = own
        engine_grad_enabled, engine_inference, _, engine_depth = self._engine
        self._began, self._grad_enabled = True, grad_enabled
        self._functions = [_pop_mode() for _ in range(depth - engine_depth)]
        self._autocast = _autocast() if autocast else None
        self._alike = own if own == self._engine and not autocast and self._engine_autocast is None else None
        if self._autocast is not None or self._engine_autocast is not None:
            _change_autocast(_autocast(), self._engine_autocast or self._off)
        if is_inference_mode_enabled() != engine_inference:
            self._guard = torch.inference_mode(engine_inference)
            self._guard.__enter__()
        if is_grad_enabled() != engine_grad_enabled:
            _set_grad_enabled(engine_grad_enabled)


@contextmanager
def modes_restored() -> Generator[None]:
    """Torch's modes after it as before it, also where an interrupt has ended a hand-over halfway."""
    depth, grad, inference = _len_torch_function_stack(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = _autocast()
    try:
        yield
    finally:
        while _len_torch_function_stack() > depth:
            _pop_mode()
        if torch.is_inference_mode_enabled() != inference:
            torch.inference_mode(inference).__enter__()
        _set_autocast(autocast)
        torch.set_grad_enabled(grad)


def is_autocast_on() -> bool:
    """On any kind of device."""
    return _is_any_autocast_enabled()


def without_autocast() -> AbstractContextManager[object]:
    """In which values are cut out and put back: autocast, in which a block may stand, would round scores."""
    return _autocast_off() if _is_any_autocast_enabled() else nullcontext()


@contextmanager
def _autocast_off() -> Generator[None]:
    autocast = _autocast()
    _set_autocast(_disabled(autocast))
    try:
        yield
    finally:
        _set_autocast(autocast)


def _autocast() -> _Autocast:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _disabled(autocast: _Autocast) -> _Autocast:
    return tuple((kind, False, dtype) for kind, _, dtype in autocast)


def _change_autocast(found: _Autocast, wanted: _Autocast) -> None:
    if found != wanted:
        _set_autocast(wanted)


def _set_autocast(autocast: _Autocast) -> None:
    for kind, enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
