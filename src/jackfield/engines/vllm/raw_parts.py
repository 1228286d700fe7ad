"""What passes at a raw place, on several ranks: whole, or the parts that vLLM's own linear layers make, or refused.

A raw place has no contract that says what it is, so nothing of it is taken on trust: ranks compare what they have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jackfield.engines.vllm.parts import Ranks, SideBySide, repeat
from jackfield.engines.vllm.seen import Tolerance
from jackfield.engines.vllm.structure import is_listened_to
from jackfield.errors import Unavailable
from jackfield.interleave.site import Port


@dataclass(frozen=True, slots=True)
class RawJoint:
    """How the parts of one raw place's tensors are joined: `pieces` of the last axis, each side by side over ranks.

    `heads`: a tensor is heads, of which several ranks may have the same; how many do, their numbers tell.
    """

    ranks: Ranks
    pieces: Sequence[tuple[int, SideBySide]]
    heads: bool

    @classmethod
    def of(cls, ranks: Ranks, root: nn.Module, path: str, port: str) -> "RawJoint":
        """For a place of a module: `port` is "input", "inputs" or "output"."""
        module = root.get_submodule(path)
        return cls(ranks, _pieces(ranks, module, port), is_listened_to(module))

    def join(self, part: Tensor, name: str) -> Tensor:
        """The whole of a tensor; Unavailable where ranks differ in it, and nothing says how."""
        if self.ranks.size == 1:
            return part
        own = part.contiguous()
        parts = self.ranks.gathered(own.view(torch.uint8))
        count = repeat(parts, partial(_same, own.dtype))
        if count == self.ranks.size:
            return part
        if self.heads:
            return SideBySide(self.ranks, count).join(own, -1)
        sizes = [size for size, _ in self.pieces]
        if part.shape[-1] != sum(sizes):
            raise Unavailable(
                f"{name} is not the same on the {self.ranks.size} ranks of this model: each has its own heads, neurons "
                "or sums. Read the value by its name in the contract (model.support() lists them), or load the model "
                "with tensor_parallel_size=1."
            )
        return self._each(torch.split(own, sizes, -1), SideBySide.join)

    def cut(self, whole: Tensor, width: int) -> Tensor:
        """This rank's part, `width` wide, of a tensor that `join` made."""
        if whole.shape[-1] == width:
            return whole
        if self.heads:
            return SideBySide(self.ranks, self.ranks.size * width // whole.shape[-1]).cut(whole, -1)
        sizes = [joint.count(size) for size, joint in self.pieces]
        return self._each(torch.split(whole, sizes, -1), SideBySide.cut)

    def _each(self, pieces: Sequence[Tensor], made: Callable[[SideBySide, Tensor, int], Tensor]) -> Tensor:
        joints = (joint for _, joint in self.pieces)
        return torch.cat([made(joint, piece, -1) for joint, piece in zip(joints, pieces, strict=True)], -1)


def _same(dtype: torch.dtype, one: Tensor, other: Tensor) -> bool:
    """Whether two ranks' bytes of this dtype are the same numbers, but for rounding.

    Where more than two ranks sum, each may begin with another one's addend.
    """
    if torch.equal(one, other) or not dtype.is_floating_point:
        return torch.equal(one, other)
    return Tolerance.of(dtype).same(one.view(dtype).float(), other.view(dtype).float())


def _pieces(ranks: Ranks, module: Any, port: str) -> list[tuple[int, SideBySide]]:
    """Of vLLM's linear layers, by its names of 0.32; of all else nothing is known."""
    kinds = {base.__name__ for base in type(module).__mro__}
    if "RowParallelLinear" in kinds and port != Port.OUTPUT and module.input_is_parallel:
        return [(module.input_size_per_partition, SideBySide(ranks))]
    if "ColumnParallelLinear" not in kinds or port != Port.OUTPUT or module.gather_output:
        return []
    sizes: list[int] = module.output_partition_sizes
    replicas = getattr(module, "num_kv_head_replicas", 1)  # of queries, keys and values in one: not of the queries
    return [(size, SideBySide(ranks, replicas if place else 1)) for place, size in enumerate(sizes)]
