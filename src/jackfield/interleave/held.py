"""What a block was handed, and how it is found out that the block changed it: in time, or too late."""

import weakref
from functools import lru_cache
from sys import getrefcount
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from jackfield.interleave.nest import tensors

if TYPE_CHECKING:
    from jackfield.interleave.channel import Channel, Selection

SMALL_BYTES: Final = 1 << 16
"""A copy up to this size is kept until it is looked at: that is cheaper than a witness of it that has no memory."""
MANY: Final = 32
"""Copies that were let go, after which they are looked at, and those that nobody has any more forgotten."""


class Held:
    """A private copy in the block's hands, with the version of its tensor when it was last as the model's.

    When the block has moved past it, that it was changed is seen even where the block has dropped it. The memory of a
    large one is not kept: a witness shares its version counter, and keeps that when it is given other data.
    """

    __slots__ = ("_large", "channel", "selection", "shape", "step", "tensor", "value", "version")

    def __init__(self, channel: "Channel", selection: "Selection", value: Any, step: int) -> None:
        self.channel, self.selection, self.value, self.step = channel, selection, value, step
        self.tensor: Tensor = value
        self.shape, self.version = value.shape, value._version
        self._large: weakref.ref[Tensor] | None = None

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.version

    @property
    def reshaped(self) -> tuple[torch.Size, torch.Size] | None:
        """The shape that it had and the one that it was given in place; None where these are the same."""
        return None if self.tensor.shape == self.shape else (self.shape, self.tensor.shape)

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad

    def settled(self) -> None:
        """The model has it as it is now."""
        self.version = self.tensor._version

    def let_go(self) -> None:
        """The block has moved past it."""
        self.value = None
        if self.tensor.nbytes > SMALL_BYTES:
            self._large = weakref.ref(self.tensor)
            self.tensor = _witness(self.tensor)

    @property
    def anywhere(self) -> bool:
        """Whether anyone has the copy still, after it was let go."""
        if self._large is not None:
            return self._large() is not None
        return _references(self) > _own_references()


class HeldNest:
    """The same of a private copy that is a nest of tensors: of each of them."""

    __slots__ = ("_members", "channel", "selection", "step", "value")

    def __init__(self, channel: "Channel", selection: "Selection", value: Any, step: int) -> None:
        self.channel, self.selection, self.value, self.step = channel, selection, value, step
        self._members = [Held(channel, selection, tensor, step) for tensor in tensors(value)]

    @property
    def changed(self) -> bool:
        return any(member.changed for member in self._members)

    @property
    def reshaped(self) -> tuple[torch.Size, torch.Size] | None:
        """Of one of its tensors."""
        return next((member.reshaped for member in self._members if member.reshaped is not None), None)

    @property
    def requires_grad(self) -> bool:
        return any(member.requires_grad for member in self._members)

    def settled(self) -> None:
        """The model has them as they are now."""
        for member in self._members:
            member.settled()

    def let_go(self) -> None:
        """The block has moved past it."""
        self.value = None
        for member in self._members:
            member.let_go()

    @property
    def anywhere(self) -> bool:
        """Whether anyone has one of them still."""
        return any(member.anywhere for member in self._members)


def _references(holder: Any) -> int:
    """To the tensor of a Held, or of what stands for one."""
    return getrefcount(holder.tensor)


@lru_cache(maxsize=1)
def _own_references() -> int:
    """Those to a tensor that nobody else has; versions of Python count differently."""
    return _references(SimpleNamespace(tensor=torch.empty(0)))


def _witness(tensor: Tensor) -> Tensor:
    witness = tensor.detach()
    witness.data = witness.new_empty(0)
    return witness
