"""A request's block on its way to the workers, and what became of it on the way back.

Blocks are code, pickled by value: what a client sends is unpickled in the workers of its own engine, and nowhere else.
Parts of a model go as what they are called; on the other side they are parts of the model there. Errors keep their
class, their attributes, what they came of, and the lines that they passed.
"""

import copyreg
import io
import marshal
import pickle
import site
import sys
import sysconfig
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any, Final, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import Tensor

from jackfield.engines.engine import Engine
from jackfield.errors import TracingError
from jackfield.interleave.reference import Shared
from jackfield.interventions.block import InterventionBlock
from jackfield.interventions.kinds import Intervention
from jackfield.trace.capture import Block
from jackfield.values.layer import Layers
from jackfield.values.part import Part

MOST_LINES: Final = 32
"""Of each end of a traceback that is sent."""

KEY: Final = "jackfield"
"""Under which a request's extra_args carry its block, and the runner's output the requests that end."""


@dataclass(frozen=True, slots=True)
class Interventions:
    """The interventions beside a request. `payload` is one for all requests that have the same."""

    payload: bytes
    prompt_length: int
    max_tokens: int

    @classmethod
    def of(cls, block: InterventionBlock) -> "Interventions":
        """A block that is data."""
        payload = dumps_data((block.interventions, block.num_layers, dict(block.shapes)))
        return cls(payload, block.prompt_length, block.max_tokens)

    @property
    def block(self) -> InterventionBlock:
        """The block again."""
        return InterventionBlock(*unpacked(self.payload), self.prompt_length, self.max_tokens)


def unpacked(payload: bytes) -> tuple[tuple[Intervention, ...], int, dict[str, tuple[int, ...]]]:
    """The interventions of a payload, how many layers their model has, and the shapes of the rows that they keep."""
    with torch.inference_mode(False):
        return pickle.loads(payload)


@dataclass(frozen=True, slots=True)
class Shipment:
    """What the workers need of one sample of one request."""

    name: str  # the client's own; vLLM renames requests
    block: Block | InterventionBlock | Interventions
    prompt: str | None
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands for itself on both ends of a way: an engine, the model over it, and what was shared with it.

    `shared` says what an object is called on the other end (`Shared` to its key), or finds it (the other way round).
    """

    engine: Engine
    model: Any
    shared: Callable[[Any], Any]


def shipped(params: Any) -> tuple[str, bytes] | None:
    """The name and the block that `vllm.SamplingParams` bring, if they do.

    Only bytes are a block. What comes over HTTP is JSON, which has none: it is never unpickled.
    """
    extra: dict[str, Any] | None = params and params.extra_args
    if not extra:
        return None
    match extra.get(KEY):
        case [str() as name, bytes() as data]:
            return name, data
        case _:
            return None


def pack(shipment: Shipment, ends: Ends) -> bytes:
    """A shipment as bytes. TracingError names what cannot be sent."""
    if isinstance(shipment.block, Interventions):
        return dumps_data(shipment)
    try:
        with _by_value(shipment.block.module):  # of a block that is code
            return dumps(shipment, ends)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TracingError(
            f"The block at {shipment.block.origin} cannot be sent to vLLM's workers: {error}. Make what it uses inside "
            "the block, or pass it plain data."
        ) from error


def dumps(value: Any, ends: Ends, apart: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Any object as bytes. The memory of tensors is handed to `apart`, where it is given."""
    buffer = io.BytesIO()
    _Packer(buffer, ends, apart).dump(value)
    return buffer.getvalue()


def dumps_data(value: Any, apart: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """An object of plain data and tensors as bytes, which `loads` takes as well: no code, and nothing of a model's."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5, buffer_callback=apart)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _of_tensor}
    pickler.dump(value)
    return buffer.getvalue()


def loads(data: bytes, ends: Ends, buffers: Sequence[Any] | None = None) -> Any:
    """The object again; parts are of this end's model. Tensors stand in the memory of `buffers`."""
    with torch.inference_mode(False):  # a tensor born in it has no version counter
        return _Unpacker(io.BytesIO(data), ends, buffers).load()


class _Packer(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO, ends: Ends, apart: Any) -> None:
        super().__init__(buffer, protocol=5, buffer_callback=apart)
        self._ends = ends

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._ends.engine:
            return ("engine",)
        if obj is self._ends.model:
            return ("model",)
        return ("shared", self._ends.shared(obj)) if type(obj) is Shared else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Part):
            server, *place = (getattr(obj, name) for name in ("_server", "_path", "_layer", "_call"))
            if server is not self._ends.engine:
                raise pickle.PicklingError(f"{obj!r} is a part of another model")
            return type(obj), (server, *place)
        if isinstance(obj, Layers):
            return Layers, (obj._server, len(obj))  # pyright: ignore[reportPrivateUsage]
        if isinstance(obj, CodeType):  # cloudpickle forgets which file it is of
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, BaseException):
            return _error, _of_error(obj)
        if type(obj) is Tensor and _is_plain(obj):
            return _of_tensor(obj)
        return cast("Any", super().reducer_override(obj))


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, ends: Ends, buffers: Sequence[Any] | None) -> None:
        super().__init__(buffer, buffers=buffers)
        self._ends = ends

    def persistent_load(self, pid: tuple[str, ...]) -> Any:
        if pid[0] == "shared":
            return self._ends.shared(pid[1])
        return self._ends.engine if pid[0] == "engine" else self._ends.model


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_quantized and tensor.is_leaf
    return dense and tensor.numel() > 0 and not vars(tensor)


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor is made again. It is copied to the CPU: where it is sent there may be no such device."""
    if not tensor.numel():
        return _empty, (tensor.dtype, tensor.shape)
    memory: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(memory), tensor.dtype, tensor.shape, tensor.requires_grad)


def _tensor(memory: Any, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(shape).requires_grad_(requires_grad)


def _empty(dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _of_error(error: BaseException) -> tuple[Any, ...]:
    kin = error.__cause__, error.__context__, error.__suppress_context__
    return type(error), error.args, dict(vars(error)), kin, _lines(error.__traceback__)


def _error(
    kind: type[BaseException],
    args: tuple[Any, ...],
    attributes: dict[str, Any],
    kin: tuple[BaseException | None, BaseException | None, bool],
    lines: Any,
) -> BaseException:
    """An error as it was. A constructor written in Python is not called: it may want other arguments than `args`."""
    made = kind.__new__(kind, *args)
    made.args = args
    if not isinstance(kind.__init__, FunctionType):
        kind.__init__(made, *args)
    vars(made).update(attributes)
    made.__cause__, made.__context__, made.__suppress_context__ = kin
    return made.with_traceback(_traceback(lines))


def _lines(trace: TracebackType | None) -> Any:
    """Which lines a traceback passed, as plain data."""
    if trace is None:
        return None
    from tblib import Traceback  # pyright: ignore[reportMissingTypeStubs]  # the extra "vllm" brings it

    return cast("Any", Traceback(_shortened(trace)).to_dict())


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    """The first and the last frames: those of a RecursionError, each in the other, would be too deep to be sent."""
    entries = list[TracebackType]()
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept = entries if len(entries) <= 2 * MOST_LINES else [*entries[:MOST_LINES], *entries[-MOST_LINES:]]
    made: TracebackType | None = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


def _traceback(lines: Any) -> TracebackType | None:
    if lines is None:
        return None
    from tblib import Traceback  # pyright: ignore[reportMissingTypeStubs]

    return cast("TracebackType | None", Traceback.from_dict(lines).as_traceback())


@contextmanager
def _by_value(name: str) -> Generator[None]:
    """While it is open, functions and classes of the module `name` are pickled whole, if it is the user's own.

    A worker in another process may not be able to import it: a test, a script's neighbour, a notebook's file.
    """
    module = sys.modules.get(name)
    if (
        module is None
        or name == "__main__"
        or not _is_users(module)
        or name in cloudpickle.list_registry_pickle_by_value()
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    installed = (sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages())
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in installed)
