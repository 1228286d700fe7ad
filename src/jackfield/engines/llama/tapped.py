"""How values of the contract are announced on the way.

A value is announced at its `point`: a `Tap` that listens there gets the tensor in the contract's shape, and what it
returns is what the model goes on with. Where nobody listens that is one comparison.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from jackfield.engines.llama.parallel import cut, gather, num_ranks


class Tap(Protocol):
    """Who listens. On several ranks all must answer alike, since what is shared out is gathered first."""

    def listens(self, name: str, layer: int | None) -> bool:
        """Whether this value is wanted now; asked each time it comes. `layer` is None on the root."""
        ...

    def __call__(self, name: str, layer: int | None, value: Tensor) -> Tensor:
        """`value` itself where nothing is edited, else another tensor of its shape and dtype.

        `value` is the model's own, perhaps a view of its cache: copy it before you edit or keep it.
        """
        ...

    def operands(self, tensors: Mapping[str, Tensor], layer: int | None) -> Mapping[str, Tensor]:
        """The same for what attention is given, all at once: {name: [batch, head, token or key, d_head]}."""
        ...


class Tapped(nn.Module):
    """A module that announces values."""

    def __init__(self, layer_id: int | None) -> None:
        super().__init__()
        self.layer_id, self.ranks = layer_id, num_ranks()
        self.tap: Tap | None = None

    def listen(self, tap: Tap | None) -> None:
        """Announces values to `tap` from now on; None ends that."""
        self.tap = tap

    def listens(self, name: str) -> bool:
        """Whether anybody wants this value of this layer."""
        return self.tap is not None and self.tap.listens(name, self.layer_id)

    def point(self, name: str, value: Tensor, sharded: int | None = None) -> Tensor:
        """`value`, or what it was edited to; `sharded` is the axis of which this rank holds a part."""
        if self.tap is None or not self.listens(name):
            return value
        whole = value if sharded is None else gather(value, sharded, self.ranks)
        edited = self.tap(name, self.layer_id, whole)
        if edited is whole:
            return value
        return edited if sharded is None else cut(edited, sharded, self.ranks)


def wide(x: Tensor) -> Tensor:
    """`x` in float32, in which norms, turns and softmax are computed, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
