"""Tensor parallelism: what of a value one rank has, and how the ranks' parts are joined and cut.

Every rank runs every block, from the same scheduler's output, the same request and the same random numbers. A value
that all ranks have whole is read as on one rank. One that is spread over them is joined when a block reads it, on
every rank alike and so in the same order; what a block writes back is cut to this rank's part. So blocks see heads and
neurons numbered as in the model, and their edits need no messages. Which of the two a value is, the probe's numbers
tell: parts that are equal are the whole; parts of heads and neurons stand side by side, in the order of the ranks,
keys and values of fewer heads than ranks several times over; parts of the stream that differ are addends of it, which
the model sums later. Anything else is refused with the reason. Scores and patterns are computed of this rank's heads
alone and then joined, so no key leaves its rank unless it is asked for.

A block that does not do the same everywhere, because it asks for the time or goes through a set of strings, would leave
ranks waiting for each other for ever. So ranks say to one another what they are about to join, and where their blocks
wait; where they differ that request ends with an error.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.engines.vllm.foreign import foreign
from jackfield.interleave.channel import Selection

Places = Sequence[int] | slice


class Ranks:
    """The ranks over which heads and neurons are spread: vLLM's tensor-parallel group, as this process has it."""

    def __init__(self) -> None:
        self._group = foreign("vllm.distributed", "get_tp_group")()  # what is asked of it is so named in 0.32
        self.size: int = self._group.world_size
        self.rank: int = self._group.rank_in_group

    def gathered(self, part: Tensor) -> Tensor:
        """The parts of all ranks, of one shape, [rank, ...]: a new tensor. To be called on all of them."""
        there = part.to(self._group.device).contiguous()
        if there.device.type != "cpu":
            return self._group.all_gather(there[None], dim=0).to(part.device)
        found = there.new_empty(self.size, *there.shape)  # vLLM's own, on processors with AVX-512, takes no bytes
        dist.all_gather(list(found.unbind()), there, group=self._group.cpu_group)
        return found.to(part.device)

    def told(self, what: Any) -> list[Any]:
        """What each rank says, by rank: any object that can be pickled. To be called on all of them."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, what, group=self._group.cpu_group)
        return said

    def agree(self, what: str) -> bool:
        """Whether all ranks say the same. To be called on all of them."""
        digest = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=7).digest())
        own = torch.tensor([digest], device="cpu")  # whatever a block has made its default
        said = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(said, own, group=self._group.cpu_group)
        return all(torch.equal(other, own) for other in said)


def repeat(parts: Tensor, same: Callable[[Tensor, Tensor], bool]) -> int:
    """How many ranks in a row have the same, at most, of their parts [rank, ...]."""
    size = parts.shape[0]
    counts = (count for count in range(size, 0, -1) if size % count == 0)
    return next(
        count for count in counts if all(same(part, parts[rank - rank % count]) for rank, part in enumerate(parts))
    )


class Joint:
    """How a value's parts make the value: every rank has all of it."""

    def join(self, part: Tensor, axis: int) -> Tensor:
        """The value, of all ranks' parts: a new tensor, or `part` itself where that is all of it."""
        return part

    def cut(self, whole: Tensor, axis: int) -> Tensor:
        """This rank's part of the value: a view of it where it can be one."""
        return whole

    def count(self, here: int) -> int:
        """How many heads there are, of which so many are here."""
        return here

    def own(self, selection: Selection, count: int) -> tuple[Places, Selection]:
        """What is this rank's of a selection of heads, of which `count` are here: places in it, and the same by numbers
        of heads here.
        """
        return slice(None), selection


class SideBySide(Joint):
    """Each rank has the next part along an axis; `repeat` ranks in a row have the same one."""

    def __init__(self, ranks: Ranks, repeat: int = 1) -> None:
        self._ranks, self._repeat = ranks, repeat

    def join(self, part: Tensor, axis: int) -> Tensor:
        return torch.cat(self._ranks.gathered(part)[:: self._repeat].unbind(), axis)

    def cut(self, whole: Tensor, axis: int) -> Tensor:
        count = whole.shape[axis] * self._repeat // self._ranks.size
        return whole.narrow(axis, self._first(count), count)

    def count(self, here: int) -> int:
        return here * self._ranks.size // self._repeat

    def own(self, selection: Selection, count: int) -> tuple[Places, Selection]:
        first = self._first(count)
        if selection.heads is None:
            return slice(first, first + count), selection
        found = [(place, head - first) for place, head in enumerate(selection.heads) if first <= head < first + count]
        return [place for place, _ in found], Selection(tuple(head for _, head in found), selection.tokens)

    def _first(self, count: int) -> int:
        return self._ranks.rank // self._repeat * count


class Summed(Joint):
    """Each rank has an addend, which the model has not summed yet."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def join(self, part: Tensor, axis: int) -> Tensor:
        return self._ranks.gathered(part).sum(0)

    def cut(self, whole: Tensor, axis: int) -> Tensor:
        return whole if self._ranks.rank == 0 else torch.zeros_like(whole)


WHOLE_PART: Final = Joint()
