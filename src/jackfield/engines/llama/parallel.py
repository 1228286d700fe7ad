"""Linear layers shared out over the ranks of torch.distributed's default group, and values announced whole.

How many ranks share a module is settled when it is made: a model made without a group stays whole beside one with.
A value is announced at its `point`: where a tap listens, what comes of it there is what the model goes on with.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from jackfield.engines.inline import Tap
from jackfield.errors import Unavailable, UnsupportedModel


def num_ranks() -> int:
    """How many ranks share the model; one without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def share(total: int, what: str) -> int:
    """How many of `total` things each rank has. UnsupportedModel where the ranks do not divide them."""
    if total % num_ranks():
        raise UnsupportedModel(f"{total} {what} do not divide among {num_ranks()} ranks.")
    return total // num_ranks()


def gather(part: Tensor, axis: int | None, ranks: int) -> Tensor:
    """The parts of all ranks, joined along `axis`: a copy, or `part` itself where it is whole."""
    if axis is None or ranks == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, axis)


def cut(whole: Tensor, axis: int | None, ranks: int) -> Tensor:
    """This rank's part of `whole` along `axis`: a view."""
    return whole if axis is None or ranks == 1 else whole.chunk(ranks, axis)[dist.get_rank()]


class Tapped(nn.Module):
    """A module that announces values of its layer, which is None on the root."""

    def __init__(self, layer_id: int | None) -> None:
        super().__init__()
        self.layer_id, self.ranks = layer_id, num_ranks()
        self.tap: Tap | None = None

    def listens(self, name: str) -> bool:
        """Whether anybody wants this value of this layer."""
        return self.tap is not None and self.tap.listens(name, self.layer_id)

    def point(self, name: str, value: Tensor, sharded: int | None = None) -> Tensor:
        """`value`, or what it was edited to; `sharded` is the axis of which this rank holds a part."""
        return self.points({name: value}, sharded)[name] if self.listens(name) else value

    def points(self, values: Mapping[str, Tensor], sharded: int | None) -> Mapping[str, Tensor]:
        """The same for several that somebody listens to, all at once."""
        assert self.tap is not None
        whole = {name: gather(value, sharded, self.ranks) for name, value in values.items()}
        taken = self.tap.operands(whole, self.layer_id)
        edited = {name: cut(taken[name], sharded, self.ranks) for name in whole if taken[name] is not whole[name]}
        return {**values, **edited}


class ColumnParallelLinear(nn.Linear):
    """[..., in_features] to this rank's part, heads, neurons or words, of [..., out_features]."""

    axis = 0  # which ranks share

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, share(out_features, "outputs"), bias)


class RowParallelLinear(nn.Linear):
    """This rank's part of [..., in_features] to all of [..., out_features]: the sum over ranks, then the bias, once."""

    axis = 1

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(share(in_features, "inputs"), out_features, bias)
        self.ranks = num_ranks()

    def forward(self, input: Tensor) -> Tensor:
        total = F.linear(input, self.weight, self.bias if self.ranks == 1 or dist.get_rank() == 0 else None)
        if self.ranks > 1:
            if total.requires_grad:
                raise Unavailable("Gradients do not cross ranks: load the model on one rank, or use torch.no_grad().")
            dist.all_reduce(total)
        return total
