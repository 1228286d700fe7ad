"""Where queries and keys are before the rotary embedding.

At position 0 the rotary embedding rotates by nothing. So of all that the attention's projections and norms gave, the
tensor whose first token holds the first query of every head, up to a length, is the queries before the rotation; and how
the heads lie in it is read off the same comparison.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jackfield.engines.transformers.attends import Attend
from jackfield.engines.transformers.dataflow import Block
from jackfield.engines.transformers.recording import Call, Seen
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Missing, Projection

_NOT_FOUND = Missing("no module of this attention gives these before the rotary embedding")


@dataclass(frozen=True, slots=True)
class _Cut:
    """How heads lie in a row: see Projection."""

    first: int
    count: int
    groups: int
    repeat: int


def find_projection(block: Block, attend: Attend, heads: Tensor, clip: float | None) -> Projection | Missing:
    """Where `heads` [head, token, width], queries or keys as the op received them, are before the rotary embedding."""
    calls = [
        call
        for call in block.inside
        if call.end < attend.index and call.result is not None and call.is_tensor and block.once(call)
    ]
    inside = [call for call in calls if call.path.startswith(f"{attend.path}.")] or calls
    for call in reversed(inside):
        found = _cut(block, call, heads, clip)
        if found is not None and _is_chained(inside, call):
            return found
    return _NOT_FOUND


def _cut(block: Block, call: Call, heads: Tensor, clip: float | None) -> Projection | None:
    assert call.result is not None
    tensor, width = call.result.value, heads.shape[-1]
    site = Site(call.path, Port.OUTPUT)
    if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[-1] == width:
        axis = 2 if tensor.shape[1] == block.tokens else 1
        split = tensor[0] if axis == 2 else tensor[0].transpose(0, 1)
        order = _places(split[0], heads[:, 0], block.dtype)
        if order != list(range(heads.shape[0])) or split.shape[1] != heads.shape[0]:
            return None
        return _factored(Projection(site, width, count=heads.shape[0], heads_axis=axis), split, heads, block)
    if tensor.ndim != 3 or tensor.shape[:2] != (1, block.tokens) or tensor.shape[-1] % width:
        return None
    clipped = tensor if clip is None else tensor.clamp(-clip, clip)
    split = clipped[0].unflatten(-1, (-1, width))
    order = _places(split[0], heads[:, 0], block.dtype)
    cut = None if order is None else _layout(order, split.shape[1])
    if order is None or cut is None:
        return None
    projection = Projection(site, width, cut.first, cut.count, cut.groups, clip=clip, repeat=cut.repeat)
    return _factored(projection, split[:, order], heads, block)


def _factored(projection: Projection, before: Tensor, heads: Tensor, block: Block) -> Projection:
    """`projection` with its factor, on layers that rotate nothing: there the op receives it times one number."""
    after = heads.transpose(0, 1).double()
    before = before.double()
    factor = float((before * after).sum() / (before * before).sum())
    alike = (factor * before - after).abs().amax() <= 1e-4 * after.abs().amax()
    return replace(projection, factor=factor) if alike and abs(factor - 1) > 1e-4 else projection


def _places(pieces: Tensor, heads: Tensor, dtype: torch.dtype) -> list[int] | None:
    """Which of `pieces` [piece, width] points where each of `heads` [head, width] does; None unless all are found.

    Lengths are left out: YaRN, and norms after the rotation, change them.
    """
    directions = torch.nn.functional.normalize(pieces.double(), dim=-1)
    wanted = torch.nn.functional.normalize(heads.double(), dim=-1)
    cosines = wanted @ directions.T
    best = cosines.max(dim=1)
    exact = 1e-3 if dtype in (torch.bfloat16, torch.float16) else 1e-9
    return best.indices.tolist() if bool((best.values > 1 - exact).all()) else None


def _layout(order: list[int], pieces: int) -> _Cut | None:
    """The cut whose heads are the pieces `order`, of `pieces` in a row; None where there is none."""
    repeat = next((n for n, (a, b) in enumerate(zip(order, order[1:], strict=False), 1) if a != b), len(order))
    distinct = order[::repeat]
    if [place for place in distinct for _ in range(repeat)] != order:
        return None
    count = next(
        (n for n, (a, b) in enumerate(zip(distinct, distinct[1:], strict=False), 1) if b != a + 1), len(distinct)
    )
    groups = len(distinct) // count
    size = pieces // groups
    expected = [group * size + order[0] + head for group in range(groups) for head in range(count)]
    if expected != distinct or pieces % groups or order[0] + count > size:
        return None
    return _Cut(order[0], count, groups, repeat)


def _is_chained(calls: list[Call], call: Call) -> bool:
    """Whether what `call` took is what a module gave, and nothing (a rotary embedding) came between.

    Asked of modules that take heads: a projection takes the stream.
    """
    taken = call.argument
    if taken is None or call.result is None or taken.value.ndim != 4:
        return True
    row = taken.value[0].transpose(0, 1) if taken.value.shape[1] != call.result.value.shape[1] else taken.value[0]
    makers = [other.result for other in calls if other.end < call.start and other.result is not None]
    return any(_contains(maker, row) for maker in makers)


def _contains(made: Seen, taken: Tensor) -> bool:
    return bool(torch.isin(taken.float(), made.value.float()).all())
