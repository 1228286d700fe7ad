"""Where a tensor passes: a port of a module, one argument or one item of it.

A site says nothing of meaning: that `model.layers.3` gives the residual stream is an anatomy's business.
"""

from enum import StrEnum
from typing import NamedTuple


class Port(StrEnum):  # a str's hash is C's and kept; an Enum's is neither, and slots are looked up by it
    """The side of a module's call at which a tensor passes."""

    INPUT = "input"
    OUTPUT = "output"
    ATTEND = "attend"  # the attention op: queries, keys and values have arrived, nothing has been computed
    SCORES = "scores"  # entering the softmax
    PATTERN = "pattern"  # leaving the softmax
    HEADS = "heads"  # the head outputs, before gate and output projection
    PROJECT = "project"  # the first linear product inside the module's call: a router's logits


class Site(NamedTuple):  # hashed in C, as a dataclass is not: slots are looked up by it
    """One tensor at one port of one module.

    `path` is the module's own path in the model's tree ("" is the root). `key` picks from several: the position or
    the name of an argument (INPUT), the index or the name of an item of the result (OUTPUT); None is the first
    argument, or the result itself where that is a tensor, else its first item.
    """

    path: str
    port: Port
    key: int | str | None = None

    def __str__(self) -> str:
        key = "" if self.key is None else f"[{self.key!r}]"
        return f"{self.path or '(root)'}.{self.port.value}{key}"
