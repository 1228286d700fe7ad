"""What a block's copy of its outside names leaves as it is."""

from collections.abc import Iterator
from typing import Any, NoReturn, SupportsIndex, cast

from jackfield.errors import EngineError


class Reference:
    """A part of a model. Blocks get copies of the names they use from outside; a Reference stays itself."""

    __slots__ = ()


class Bound(Reference):
    """A reference to what an engine has. EngineError for whoever copies or pickles it: that would be half an engine."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise EngineError(
            f"{self!r} cannot be copied or pickled: it belongs to an engine that is loaded here. For a second model "
            "make another jackfield.Model; out of what you copy, leave it."
        )


class Shared(Reference):
    """A large object that the model keeps once: blocks use the handle as they would the object, and it is not copied.

    `value` is the object. Attributes, calls, indexing and torch functions go through to it.
    """

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these before there is a value
            raise AttributeError(name)
        return getattr(self.value, name)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __repr__(self) -> str:
        return f"<shared {type(self.value).__name__}>"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        plain = {name: _unwrapped(item) for name, item in named.items()}
        return function(*_unwrapped(args), **plain)

    def __add__(self, other: Any) -> Any:
        return self.value + other

    def __radd__(self, other: Any) -> Any:
        return other + self.value

    def __sub__(self, other: Any) -> Any:
        return self.value - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.value

    def __matmul__(self, other: Any) -> Any:
        return self.value @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Shared):
        return value.value
    if isinstance(value, tuple):
        return tuple(map(_unwrapped, cast("tuple[Any, ...]", value)))
    if isinstance(value, list):
        return list(map(_unwrapped, cast("list[Any]", value)))
    return value
