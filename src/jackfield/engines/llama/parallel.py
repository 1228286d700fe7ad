"""Linear layers shared out over the ranks of torch.distributed's default group; without a group there is one rank.

How many ranks share a module is settled when it is made: a model made without a group stays whole beside one with.

A column-parallel layer holds some of the outputs (heads, neurons, words), a row-parallel one some of the inputs, and
adds its result to the other ranks'. Not for starting ranks: `torchrun`, or the caller, does that.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from jackfield.errors import Unavailable, UnsupportedModel


def num_ranks() -> int:
    """How many ranks share the model."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def share(total: int, what: str, ranks: int | None = None) -> slice:
    """This rank's equal part of `total` things. UnsupportedModel where the ranks do not divide them."""
    ranks = num_ranks() if ranks is None else ranks
    if total % ranks:
        raise UnsupportedModel(f"{total} {what} do not divide among {ranks} ranks.")
    start = total // ranks * (dist.get_rank() if ranks > 1 else 0)
    return slice(start, start + total // ranks)


def gather(part: Tensor, axis: int, ranks: int) -> Tensor:
    """The parts of all ranks, joined along `axis`: a copy, or `part` itself on one rank."""
    if ranks == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, axis)


def cut(whole: Tensor, axis: int, ranks: int) -> Tensor:
    """This rank's part of `whole` along `axis`: a view."""
    return whole.movedim(axis, 0)[share(whole.shape[axis], "entries", ranks)].movedim(0, axis)


class ParallelLinear(nn.Module):
    """A linear layer of which this rank holds a part; `sharded` has the shared axis of the parameters with one."""

    def __init__(self, in_features: int, out_features: int, bias: bool, sharded: dict[str, int]) -> None:
        super().__init__()
        self.sharded, self.ranks = sharded, num_ranks()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.xavier_normal_(self.weight)


class ColumnParallelLinear(ParallelLinear):
    """[..., in_features] to this rank's part of [..., out_features], or to all of it with `gather_output`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, gather_output: bool = False) -> None:
        part = share(out_features, "outputs")
        super().__init__(in_features, part.stop - part.start, bias, {"weight": 0, "bias": 0})
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        part = F.linear(x, self.weight, self.bias)
        return gather(part, -1, self.ranks) if self.gather_output else part


class RowParallelLinear(ParallelLinear):
    """This rank's part of [..., in_features] to all of [..., out_features]: the sum over ranks, then the bias, once."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        part = share(in_features, "inputs")
        super().__init__(part.stop - part.start, out_features, bias, {"weight": 1})

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks == 1:
            return F.linear(x, self.weight, self.bias)
        total = F.linear(x, self.weight)
        if total.requires_grad:
            raise Unavailable("Gradients do not cross ranks: load the model on one rank, or use torch.no_grad().")
        dist.all_reduce(total)
        return total if self.bias is None else total + self.bias
