"""A request's block on its way to the workers, and what it saved on the way back.

Blocks are code, pickled by value: what a client sends is unpickled in the workers of its own engine, and nowhere else.
Parts of a model go as what they are called; on the other side they are parts of the worker's own model.
"""

import io
import pickle
import site
import sys
import sysconfig
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle
from torch import Tensor

from jackfield.engines.engine import Engine
from jackfield.errors import TracingError
from jackfield.trace.capture import Block
from jackfield.values.layer import Layers
from jackfield.values.part import Part


@dataclass(frozen=True, slots=True)
class Shipment:
    """What the workers need of one sample of one request."""

    name: str  # the client's own; vLLM renames requests
    block: Block
    prompt: str | None
    prompt_token_ids: tuple[int, ...]


def pack(shipment: Shipment, engine: Engine, model: Any) -> bytes:
    """A shipment as bytes. TracingError names what cannot be sent."""
    buffer = io.BytesIO()
    try:
        with _by_value(shipment.block.module):
            _Packer(buffer, engine, model).dump(shipment)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TracingError(
            f"The block at {shipment.block.origin} cannot be sent to vLLM's workers: {error}. Make what it uses inside "
            "the block, or pass it plain data."
        ) from error
    return buffer.getvalue()


def unpack(data: bytes, engine: Engine, model: Any) -> Shipment:
    """The shipment; parts are of `model`, the worker's own."""
    return cast("Shipment", _Unpacker(io.BytesIO(data), engine, model).load())


class _Packer(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO, engine: Engine, model: Any) -> None:
        super().__init__(buffer, protocol=5)
        self._engine, self._model = engine, model

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._engine:
            return ("engine",)
        if obj is self._model:
            return ("model",)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Part):
            if obj._server is not self._engine:
                raise pickle.PicklingError(f"{obj!r} is a part of another model")
            return type(obj), (obj._server, obj._path, obj._layer, obj._call)
        if isinstance(obj, Layers):
            return Layers, (obj._server, len(obj))
        if isinstance(obj, Tensor) and obj.device.type != "cpu":
            return cast("Any", obj.detach().cpu().__reduce_ex__(5))  # where it is sent there may be no such device
        return super().reducer_override(obj)


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, engine: Engine, model: Any) -> None:
        super().__init__(buffer)
        self._engine, self._model = engine, model

    def persistent_load(self, pid: tuple[str, ...]) -> Any:
        return self._engine if pid[0] == "engine" else self._model


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
