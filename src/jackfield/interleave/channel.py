"""What a worker waits at, what it wants of it, and how that is had: slots, selections and channels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jackfield.errors import EditMismatch
from jackfield.interleave.site import Site

if TYPE_CHECKING:
    from jackfield.interleave.worker import Worker


class Slot:
    """A site of one run: who waits there in this step, and the last forward pass in which it went by."""

    __slots__ = ("open", "passed", "site", "workers")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.open = False  # whether the engine looks at this site
        self.workers: list[Worker] = []
        self.passed = -1


class Slots(dict[Site, Slot]):
    """The one Slot of each site, made when it is first asked for."""

    def __missing__(self, site: Site) -> Slot:
        slot = self[site] = Slot(site)
        return slot


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows and heads of a value; None is all of them."""

    heads: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None

    def meets(self, other: "Selection") -> bool:
        """Whether some row of some head is in both."""
        pairs = ((self.heads, other.heads), (self.tokens, other.tokens))
        return all(one is None or two is None or not set(one).isdisjoint(two) for one, two in pairs)


WHOLE = Selection()


class Channel(ABC):
    """How one value is had at one site of an engine: cut out for a request, and put back."""

    name: str  # as users write it: "layers.3.layer_output"
    site: Site
    writable: bool
    memory: str  # what it is cut from: an edit of one channel outdates copies of others with the same memory
    together: bool = False  # whether its engine can read and write it for many requests at once

    @abstractmethod
    def read(self, passing: Any, worker: "Worker", selection: Selection) -> Any:
        """A private copy of the worker's rows, in the contract's shape."""

    def write(self, passing: Any, worker: "Worker", selection: Selection, value: Any) -> None:
        """Puts `value`, of the shape that `read` gives, in the place of the worker's rows; of `writable` channels."""
        raise EditMismatch(f"{self.name} can be read only.")

    def check(self, wanted: Any, value: Any) -> None:
        """Refuses a value that is not of the shape, dtype and device of `wanted`."""
        if not isinstance(value, Tensor):
            raise EditMismatch(
                f"{self.name} was assigned a {type(value).__name__}; it takes a tensor of shape {tuple(wanted.shape)}."
            )
        for what, got, want in _differences(value, wanted):
            raise EditMismatch(
                f"{self.name} was edited with {what} {got}; it has {what} {want}. Nothing is broadcast or cast."
            )


def _differences(value: Tensor, wanted: Tensor) -> Iterator[tuple[str, Any, Any]]:
    if value.shape != wanted.shape:
        yield "shape", tuple(value.shape), tuple(wanted.shape)
    if value.dtype != wanted.dtype:
        yield "dtype", value.dtype, wanted.dtype
    if value.device != wanted.device:
        yield "device", value.device, wanted.device
    if value.layout != wanted.layout:
        yield "layout", value.layout, wanted.layout
