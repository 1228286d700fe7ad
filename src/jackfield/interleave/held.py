"""What a block was handed, and how it is found out that the block changed it: in time, or too late."""

import sys
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from jackfield.interleave.nest import tensors

if TYPE_CHECKING:
    from jackfield.interleave.worker import Channel, Selection

SMALL_BYTES: Final = 1 << 16
"""A copy up to this size is kept until its step is over: that is cheaper than a witness of it that has no memory."""
MANY: Final = 32
"""Copies that were let go, after which those that nobody has any more are forgotten."""
_Leaves = list[tuple[Tensor, torch.Size, int]]


class Held:
    """A private copy in the block's hands, with the versions of its tensors when they were last as the model's.

    When the block has moved past it, that it was changed is seen even where the block has dropped it. The memory of a
    large one is not kept: a witness shares its version counter, and keeps that when it is given other data.
    """

    __slots__ = ("_large", "channel", "leaves", "selection", "step", "value")

    def __init__(self, channel: "Channel", selection: "Selection", value: Any, step: int) -> None:
        self.channel, self.selection, self.value, self.step = channel, selection, value, step
        if isinstance(value, Tensor):
            self.leaves: _Leaves = [(value, value.shape, value._version)]
        else:
            self.leaves = [(leaf, leaf.shape, leaf._version) for leaf in tensors(value)]
        self._large: list[weakref.ref[Tensor]] | None = None

    @property
    def changed(self) -> bool:
        for leaf, _, version in self.leaves:  # noqa: SIM110 - any() takes twice the time
            if leaf._version != version:
                return True
        return False

    def settled(self) -> None:
        self.leaves = [(leaf, shape, leaf._version) for leaf, shape, _ in self.leaves]

    def let_go(self) -> None:
        """The block has moved past it."""
        self.value = None
        for leaf, _, _ in self.leaves:
            if leaf.nbytes > SMALL_BYTES:
                self._large = [weakref.ref(each) for each, *_ in self.leaves]
                self.leaves = [(_witness(each), shape, version) for each, shape, version in self.leaves]
                return

    @property
    def anywhere(self) -> bool:
        """Whether anyone has the copy still, after it was let go."""
        if self._large is not None:
            return any(each() is not None for each in self._large)
        return _references(self.leaves) > _own_references()


def _references(leaves: _Leaves) -> int:
    """To the leaf that has most."""
    most = 0
    for leaf, _, _ in leaves:
        most = max(most, sys.getrefcount(leaf))
    return most


@lru_cache(maxsize=1)
def _own_references() -> int:
    """Those to a leaf that nobody else has: of the list, of the loop; versions of Python count differently."""
    return _references([(torch.empty(0), torch.Size(), 0)])


def _witness(tensor: Tensor) -> Tensor:
    witness = tensor.detach()
    witness.data = witness.new_empty(0)
    return witness
