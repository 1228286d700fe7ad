"""The torch modes of a block: greenlets share those of their thread, so each hand-over puts them away and back."""

import torch
from torch._C import _len_torch_function_stack  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]


class BlockModes:
    """What a block has set of torch's thread-wide modes, while it waits.

    Gradients on or off, inference mode, and function modes (`with torch.device(...)`): the engine finds its own as it
    left them, and the block its own.
    """

    def __init__(self) -> None:
        self._grad_enabled = False
        self._functions: list[TorchFunctionMode] = []
        self._engine_grad_enabled = False
        self._engine_inference = False
        self._depth = 0
        self._guard: torch.inference_mode | None = None

    def enter(self) -> None:
        """The block runs on."""
        self._engine_grad_enabled = torch.is_grad_enabled()
        self._engine_inference = torch.is_inference_mode_enabled()
        if self._guard is not None:
            self._guard.__exit__(None, None, None)  # pyright: ignore[reportUnknownMemberType]
            self._guard = None
        self._depth = _len_torch_function_stack()
        for mode in reversed(self._functions):
            _push_mode(mode)
        torch.set_grad_enabled(self._grad_enabled)

    def leave(self) -> None:
        """The block waits, or has ended."""
        self._functions = [_pop_mode() for _ in range(_len_torch_function_stack() - self._depth)]
        self._grad_enabled = torch.is_grad_enabled()
        if torch.is_inference_mode_enabled() != self._engine_inference:
            self._guard = torch.inference_mode(self._engine_inference)
            self._guard.__enter__()
        torch.set_grad_enabled(self._engine_grad_enabled)
