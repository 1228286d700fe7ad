"""The raw module tree: any submodule's `.input`, `.inputs`, `.output`, by the engine's own module names."""

from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from torch import nn

from jackfield.errors import UnknownValue, near
from jackfield.values.part import Part, ValuePart, value_names
from jackfield.values.synonyms import suggestion


def submodules(module: nn.Module) -> dict[str, nn.Module]:
    """The direct submodules by name; one that stands under two names has both, as `named_children` does not say."""
    found: dict[str, nn.Module | None] = vars(module)["_modules"]
    return {name: child for name, child in found.items() if child is not None}


def named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Every module by its path, the root as ""."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", module.named_modules()))  # torch leaves its memo untyped


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a path; UnknownValue with near paths."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        near_paths = near(path, named_modules(root))
        raise UnknownValue(f"There is no module {path!r} in this model.{near_paths}") from None


RAW_NAMES: Final = frozenset({"input", "inputs", "output"})
"""What a block mentions that may want a raw place."""


class RawPort:
    """`.input` (the first argument), `.inputs` (`(args, kwargs)`) or `.output` of a module, readable and assignable."""

    def __init__(self, port: str) -> None:
        self.port = port

    def __get__(self, part: Any, owner: type | None = None) -> Any:
        return self if part is None else part.read_port(self.port)

    def __set__(self, part: Any, new: Any) -> None:
        part.write_port(self.port, new)


class Module(ValuePart):
    """A submodule by its own path. Children by attribute or index; what else the module has is passed through."""

    __slots__ = ()

    input = RawPort("input")
    inputs = RawPort("inputs")
    output = RawPort("output")

    def read_port(self, port: str) -> Any:
        """What passes at one of the module's ports, for this request."""
        worker = self._worker(f"{self._path}.{port}")
        return worker.read(self._server.raw_channel(self._path, port))

    def write_port(self, port: str, new: Any) -> None:
        """Puts `new` in the place of what passes."""
        self._worker(f"{self._path}.{port}").write(self._server.raw_channel(self._path, port), new)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself, as a function of its arguments."""
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        module = self._server.module(self._path)  # not the property: its AttributeError would bring Python here again
        if name in submodules(module):
            return self._child(name)
        try:
            return getattr(module, name)
        except AttributeError:
            known = [*submodules(module), *value_names(type(self))]
            message = f"{self!r} has no value, submodule or attribute {name!r}.{suggestion(name, known)}"
            raise UnknownValue(message) from None

    def __getitem__(self, index: int | str) -> Part:
        children = submodules(self._module)
        name = str(index % len(children)) if isinstance(index, int) and children else str(index)
        if name not in children or (isinstance(index, int) and not -len(children) <= index < len(children)):
            raise UnknownValue(f"{self!r} has no submodule {index!r}; it has {', '.join(children) or 'none'}.")
        return self._child(name)

    def __len__(self) -> int:
        return len(submodules(self._module))

    def __iter__(self) -> Iterator[Part]:
        return (self._child(name) for name in submodules(self._module))

    def __bool__(self) -> bool:
        return True

    def _child(self, name: str) -> Part:
        return self._server.part(f"{self._path}.{name}" if self._path else name)

    @property
    def _module(self) -> nn.Module:
        return self._server.module(self._path)
