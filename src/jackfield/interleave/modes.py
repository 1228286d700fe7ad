"""The torch modes of a block: greenlets share those of their thread, so they are put away and back."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import get_default_dtype, is_grad_enabled, is_inference_mode_enabled, set_default_dtype
from torch._C import (
    _functorch,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportAttributeAccessIssue]
    _InferenceMode,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _is_any_autocast_enabled,  # pyright: ignore[reportPrivateUsage]
    _len_torch_dispatch_stack,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _len_torch_function_stack,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _set_grad_enabled,  # pyright: ignore[reportPrivateUsage]
)
from torch._C._autograd import _profiler_enabled  # pyright: ignore[reportPrivateUsage]
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

from jackfield.errors import TracingError

_transforms = cast("Any", _functorch)  # of torch.func: vmap, grad and their like, each of which is a layer
_num_layers: Callable[[], int] = _transforms.get_dynamic_layer_stack_depth
_push_layer: Callable[[Any], None] = _transforms.push_dynamic_layer_stack
_pop_layer: Callable[[], Any] = _transforms.pop_dynamic_layer_stack

_Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # of each kind of device: whether it is on, and to what
_State = tuple[bool, bool, bool, int, int, int, torch.dtype]
"""Gradients, inference mode, autocast of any kind, function modes, dispatch modes, layers of torch.func, and the dtype
of tensors that are made of nothing.
"""


def _state() -> _State:
    return (
        is_grad_enabled(),
        is_inference_mode_enabled(),
        _is_any_autocast_enabled(),
        _len_torch_function_stack(),
        _len_torch_dispatch_stack(),
        _num_layers(),
        get_default_dtype(),
    )  # by hand: a `map` over the seven takes nearly twice the time


class _Stacks:
    """Modes that stand on stacks, taken off them: `with torch.device(...)`, a FlopCounterMode, `torch.func.vmap`."""

    def __init__(self) -> None:
        self._layers = list[Any]()
        self._dispatch = list[TorchDispatchMode]()
        self._functions = list[TorchFunctionMode]()

    def take(self, functions: int, dispatch: Sequence[TorchDispatchMode], layers: int) -> None:
        """All but so many function modes, these dispatch modes and so many layers.

        A mode of torch's own machinery, a FakeTensorMode, is closed: it keeps more than what stands on the stack.
        """
        self._layers = [_pop_layer() for _ in range(_num_layers() - layers)]
        self._dispatch = []
        if _len_torch_dispatch_stack() > len(dispatch):
            for mode in reversed(_opened(dispatch)):
                if mode.is_infra_mode():
                    mode.__exit__(None, None, None)
                else:
                    TorchDispatchMode.__exit__(mode, None, None, None)
                    self._dispatch.append(mode)
        self._functions = [_pop_mode() for _ in range(_len_torch_function_stack() - functions)]

    def put_back(self) -> None:
        """As they were."""
        for mode in reversed(self._functions):
            _push_mode(mode)
        for mode in reversed(self._dispatch):
            TorchDispatchMode.__enter__(mode)
        for layer in reversed(self._layers):
            _push_layer(layer)
        self._functions, self._dispatch, self._layers = [], [], []


def _opened(before: Sequence[TorchDispatchMode]) -> list[TorchDispatchMode]:
    """Dispatch modes that stand there and are none of these, the last one opened last."""
    known = [id(mode) for mode in before]
    return [mode for mode in _get_current_dispatch_mode_stack() if id(mode) not in known]


class BlockModes:
    """What a block has set of torch's thread-wide modes.

    Gradients on or off, inference mode, autocast, the default dtype, function modes (`with torch.device(...)`),
    dispatch modes and the layers of torch.func: the engine finds its own as it left them, and the block its own. A
    block starts outside of inference mode, and with the autocast that its trace stands in.

    `with` these: whatever the block asks for is done as if it had set nothing but gradients, and without autocast, in
    which scores would be rounded. Within, the block may wait: `depart` and `arrive` stand around it.
    """

    def __init__(self, *, inside_operators: bool = False) -> None:
        """`inside_operators`: the block runs on within torch's operators, which a profiler has to see whole."""
        self._inside_operators, self._engine_profiled = inside_operators, False
        self._compiling: Any = None  # what compiles the block's frames, where it stands in a function of torch.compile
        self._grad_enabled = False
        self._stacks = _Stacks()
        self._dtype: torch.dtype | None = None  # None: the engine's
        self._autocast: _Autocast | None = None
        self._engine: _State = (False, False, False, 0, 0, 0, torch.float32)
        self._alike: _State | None = None  # the same of both sides, with nothing to put away
        self._outside: _State | None = None  # the block's, where both are alike but for the engine's inference mode
        self._engine_autocast: _Autocast = ()
        self._engine_dispatch: Sequence[TorchDispatchMode] = ()
        self._inference = False  # in which torch does not note that a view of another dtype was written to

    def __enter__(self) -> None:
        """The block asks for something. TracingError in a mode that cannot be put away."""
        self._compiling = set_eval_frame(None)
        try:
            self._stand_back()
        except TracingError:
            set_eval_frame(self._compiling)
            raise

    def _stand_back(self) -> None:
        own = _state()
        if self._inside_operators and _profiler_enabled() != self._engine_profiled:
            raise TracingError(
                "A block cannot read or write a value between the beginning and the end of a torch profiler on this "
                "engine, which would end in another operator than it began in: profile what lies between two reads."
            )
        if own == self._alike:
            return
        if own == self._outside:
            _set_inference(True)
            return
        self._check()
        self._put_away(own)

    def _put_away(self, own: _State) -> None:
        engine = self._engine
        self._grad_enabled, self._dtype = own[0], own[6] if own[6] is not engine[6] else None
        self._autocast = _autocast()
        is_plain = own[2:] == engine[2:] and own[0] == engine[0] and not own[2] and own[6] is torch.float32
        self._alike = own if is_plain and own[1] == engine[1] else None
        self._outside = own if is_plain and engine[1] and not own[1] else None
        self._stacks.take(engine[3], self._engine_dispatch, engine[5])
        self._inference = own[1]
        if own[1] != engine[1]:
            _set_inference(engine[1])
        self._stand_aside()

    def depart(self) -> None:
        """The engine runs on. TracingError where the block has closed a mode that it had not opened."""
        if self._alike is not None or self._outside is not None:
            return
        _set_autocast(self._engine_autocast)
        _set_grad_enabled(self._engine[0])
        set_default_dtype(self._engine[6])
        if _state() != self._engine:
            raise TracingError(
                "The block has closed a mode of torch's that it had not opened: leave that to its owner."
            )

    def arrive(self) -> None:
        """The engine has run on."""
        engine = _state()
        self._engine_profiled = self._inside_operators and _profiler_enabled()
        if engine == self._alike or (self._outside is not None and engine == self._engine):
            return
        self._engine, self._alike, self._outside = engine, None, None
        self._engine_dispatch = _get_current_dispatch_mode_stack() if engine[4] else ()
        self._engine_autocast = _autocast()
        self._stand_aside()

    def __exit__(self, *error: object) -> None:
        """The block runs on."""
        set_eval_frame(self._compiling)
        if self._alike is not None:
            return
        if self._inference != self._engine[1]:
            _set_inference(self._inference)
        if self._outside is not None:
            _set_grad_enabled(False)
            return
        _set_autocast(self._autocast or self._engine_autocast)
        set_default_dtype(self._dtype or self._engine[6])
        self._stacks.put_back()
        _set_grad_enabled(self._grad_enabled)

    @contextmanager
    def own(self) -> Generator[None]:
        """In which a block runs."""
        self.__exit__()
        try:
            yield
        finally:
            self._put_away(_state())

    def _check(self) -> None:
        for mode in _opened(self._engine_dispatch):
            if mode.is_infra_mode():
                raise TracingError(
                    f"A block cannot read or write a value inside a {type(mode).__name__}, in which the model would "
                    "run on: do so before, or leave the mode."
                )

    def _stand_aside(self) -> None:
        _set_autocast(_disabled(self._engine_autocast))
        set_default_dtype(torch.float32)
        if not self._engine[1]:  # which has none
            _set_grad_enabled(self._grad_enabled)


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others, inside a `torch.func` transform: outside of it, it is none."""
    return _transforms.is_functorch_wrapped_tensor(tensor)


def is_dual(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries a tangent of forward-mode derivatives."""
    if forward_ad._current_level < 0:  # pyright: ignore[reportPrivateUsage]
        return False
    with torch.inference_mode(False):  # in which all have none
        return forward_ad.unpack_dual(tensor).tangent is not None


@contextmanager
def modes_restored() -> Generator[None]:
    """Torch's modes after it as before it, also where an interrupt has ended a hand-over halfway."""
    before, autocast, dispatch = _state(), _autocast(), _get_current_dispatch_mode_stack()
    try:
        yield
    finally:
        _Stacks().take(before[3], dispatch, before[5])
        if is_inference_mode_enabled() != before[1]:
            _set_inference(before[1])
        _set_autocast(autocast)
        torch.set_grad_enabled(before[0])
        set_default_dtype(before[6])


def _set_inference(enabled: bool) -> None:
    """Inference mode on or off for good.

    Torch has it as a guard alone, which puts back what was before as soon as nobody has it any more. The second of two
    puts back what the first has set.
    """
    first, second = _InferenceMode(enabled), _InferenceMode(enabled)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)


def _autocast() -> _Autocast:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _disabled(autocast: _Autocast) -> _Autocast:
    return tuple((kind, False, dtype) for kind, _, dtype in autocast)


def _set_autocast(autocast: _Autocast) -> None:
    for kind, enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
