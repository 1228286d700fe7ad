"""Objects that a model keeps under names, so that an intervention can carry the name in the place of the tensor."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jackfield.errors import near
from jackfield.interleave.reference import Shared


class Named(Shared):
    """A shared object that was given a name."""

    __slots__ = ("name",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value)
        self.name = name


def tensor_of(given: "Tensor | Shared | str", named: Mapping[str, Any]) -> Tensor:
    """The tensor itself, out of a handle, or out of those that are kept under names. ValueError where there is none."""
    if isinstance(given, str):
        if given not in named:
            has = ", ".join(map(repr, named)) or "none"
            raise ValueError(
                f"nothing is shared as {given!r} on this model; shared are {has}.{near(given, named)} Write "
                f"model.share(tensor, name={given!r}) first."
            )
        given = named[given]
    held = given.value if isinstance(given, Shared) else given
    if not isinstance(held, Tensor):
        raise ValueError(f"what is shared is a {type(held).__name__}, and a tensor is needed.")
    return held
