"""A named value: a descriptor that reads and writes it inside a block, and its line in the table of values."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jackfield.interleave.channel import WHOLE, Selection
from jackfield.values.anatomy import AttentionAnatomy

DECODE_STEP = "this engine's cache cannot be read back, so only step 0 has all the keys; read it on step 0"


@runtime_checkable  # beartype, in tests, asks isinstance
class Holder(Protocol):
    """What carries descriptors: a part of a model."""

    def read_value(self, value: "Value", selection: Selection) -> Any: ...
    def write_value(self, value: "Value", new: Any, selection: Selection) -> None: ...


@dataclass(frozen=True, eq=False)
class Value:
    """One name of the contract.

    `on` is the part it belongs to ("model", "layer", "attention", "mlp"), `axes` its shape in the contract's letters,
    `access` "r" or "rw", `dtype` "model" or "float32" or "int64". `each_step` marks what is known as soon as a step
    begins, and can be read at any time in it.
    """

    axes: str
    access: str
    meaning: str
    on: str = "layer"
    dtype: str = "model"
    each_step: bool = False
    name: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __get__(self, part: Holder | None, owner: type | None = None) -> Any:
        return self if part is None else part.read_value(self, WHOLE)

    def __set__(self, part: Holder, new: Any) -> None:
        part.write_value(self, new, WHOLE)

    @property
    def head_axis(self) -> int | None:
        """Which axis runs over heads."""
        letters = self.axes.split()
        return next((axis for axis, letter in enumerate(letters) if letter in ("H", "Hkv")), None)

    @property
    def token_axis(self) -> int | None:
        """Which axis runs over this step's tokens."""
        letters = self.axes.split()
        return letters.index("t") if "t" in letters else None


def num_heads(value: Value, attention: AttentionAnatomy) -> int:
    """The length of a value's head axis: its query heads, or its key/value heads."""
    return attention.num_kv_heads if "Hkv" in value.axes.split() else attention.num_heads


def declared(owner: type) -> tuple[Value, ...]:
    """The values that a class declares itself, in order."""
    return tuple(item for item in vars(owner).values() if isinstance(item, Value))
