"""Which part of each value a rank has, decided by the numbers of the probe on all ranks, alike on all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.vllm.parts import WHOLE_PART, Joint, Ranks, SideBySide, Summed, repeat
from jackfield.engines.vllm.seen import Seen, Tolerance
from jackfield.engines.vllm.structure import Structure
from jackfield.errors import UnsupportedModel
from jackfield.interleave.site import Port, Site

DIFFERS = "what passes there differs from rank to rank, and is neither heads, nor neurons, nor addends of the stream"


def joined(
    ranks: Ranks, structure: Structure, seen: Sequence[Seen], near: Tolerance
) -> tuple[list[Seen], Mapping[Site, Joint]]:
    """What was seen of whole values, and how each is had of its parts; a site that is in neither way had is missing.

    Its tensor is then empty. UnsupportedModel where ranks saw different sites.
    """
    if ranks.size == 1:
        return list(seen), {each.site: WHOLE_PART for each in seen}
    shapes = ranks.told([(each.site, each.x.shape, each.residual is None) for each in seen])
    if any([site for site, *_ in other] != [each.site for each in seen] for other in shapes):
        raise UnsupportedModel("The ranks of this model heard different values pass: it is not the same on each.")
    reader = _Reader(ranks, structure, seen, near)
    found, joints = list[Seen](), dict[Site, Joint]()
    for place, each in enumerate(seen):
        alike = all(other[place] == shapes[0][place] for other in shapes)
        whole, joint = reader.read(each) if alike else (_nothing(each), None)
        found.append(whole)
        if joint is not None:
            joints[each.site] = joint
    return found, joints


class _Reader:
    def __init__(self, ranks: Ranks, structure: Structure, seen: Sequence[Seen], near: Tolerance) -> None:
        self.ranks, self.near = ranks, near
        blocks = structure.blocks
        entering = Site(blocks[0].path, Port.INPUT)
        self.width = next((each.x.shape[-1] for each in seen if each.site == entering), 0)  # of the stream
        self.spread = {
            *(Site(path, Port.INPUT) for block in blocks for path in block.projections),
            *(Site(path, Port.OUTPUT) for block in blocks for path in block.makers),
        }

    def read(self, seen: Seen) -> tuple[Seen, Joint | None]:
        """The whole of what was seen, and how it is had of its parts."""
        if not seen.x.numel():
            return seen, WHOLE_PART
        parts, residual = self.ranks.gathered(seen.x), seen.residual
        if residual is not None:
            halves = self.ranks.gathered(residual)
            if self._repeat(halves) < self.ranks.size:
                return _nothing(seen), None
            residual = halves[0]
        joint = self._joint(seen, parts)
        if joint is None:
            return _nothing(seen), None
        return replace(seen, x=_of(joint, parts, self._repeat(parts)), residual=residual), joint

    def _joint(self, seen: Seen, parts: Tensor) -> Joint | None:
        count = self._repeat(parts)
        if count == self.ranks.size:
            return WHOLE_PART
        if seen.site in self.spread or seen.site.port in (Port.ATTEND, Port.HEADS):
            return SideBySide(self.ranks, count)
        return Summed(self.ranks) if parts.shape[-1] == self.width and seen.residual is None else None

    def _repeat(self, parts: Tensor) -> int:
        return repeat(parts, self.near.same)


def _of(joint: Joint, parts: Tensor, repeat: int) -> Tensor:
    """The whole, of parts that are all here."""
    if isinstance(joint, SideBySide):
        return torch.cat(parts[::repeat].unbind(), -1)
    return parts.sum(0) if isinstance(joint, Summed) else parts[0]


def _nothing(seen: Seen) -> Seen:
    return replace(seen, x=seen.x.new_empty(0, 0), residual=None)


def given_by(ranks: Ranks, projection: Any) -> Joint:
    """How what a module gives is had of its parts, where it is called apart: some leave the sum to what comes after.

    `reduce_results` is so named in the row-parallel layers of vLLM 0.32.
    """
    return WHOLE_PART if ranks.size == 1 or getattr(projection, "reduce_results", True) else Summed(ranks)
