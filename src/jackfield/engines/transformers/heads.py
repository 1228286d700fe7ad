"""Where queries and keys are before the rotary embedding, and the cut that takes them from there.

At position 0 the rotary embedding rotates by nothing. So of all that the attention's projections and norms gave, the
tensor whose first token holds the first query of every head, up to a length, is the queries before the rotation; how
the heads lie in it is read off the same comparison. Lengths are left out, because norms after the rotation and YaRN
change them; the order of a head's components is left out where no tensor fits otherwise, because rotations of
interleaved pairs may sort them.
"""

from dataclasses import replace
from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from jackfield.engines.transformers.attends import Attend
from jackfield.engines.transformers.dataflow import Block, is_norm
from jackfield.engines.transformers.recording import Call, Seen
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Heads, Missing, Projection


def cut(result: Tensor, projection: Projection) -> Float[Tensor, "batch head token width"]:
    """The heads that `projection` describes, out of the result of its module, all tokens of it. A copy or a view."""
    if projection.heads_axis is not None:
        result = (result.transpose(1, 2) if projection.heads_axis == 1 else result).flatten(2)
    if projection.clip is not None:
        result = result.clamp(-projection.clip, projection.clip)
    parts = result.reshape(*result.shape[:2], projection.groups, -1, projection.width)
    heads = parts[..., projection.first : projection.first + projection.count, :].flatten(2, 3)
    if projection.columns is not None:
        heads = heads[..., slice(*projection.columns)]
    if projection.repeat > 1:
        heads = heads.repeat_interleave(projection.repeat, dim=2)
    return (heads if projection.factor == 1.0 else heads * projection.factor).transpose(1, 2)


def find_heads(block: Block, attend: Attend, heads: Tensor, clip: float | None) -> Heads:
    """Where `heads` [head, token, width], queries or keys as the op received them, are before the rotary embedding."""
    before = [call for call in block.inside if call.end < attend.index and call.is_tensor and block.once(call)]
    calls = [call for call in before if call.path.startswith(f"{attend.path}.")] or before
    for is_sorted in (False, True):
        for call in reversed(calls):
            found = _find(block, call, heads, clip, is_sorted=is_sorted)
            if found is not None and _is_chained(calls, call) and not _rotates(block, call):
                return found
    return _find_latent(block, calls, heads) or Missing(
        "no module of this attention gives these before the rotary embedding"
    )


def _find(block: Block, call: Call, heads: Tensor, clip: float | None, *, is_sorted: bool) -> Projection | None:
    """The projection whose heads are `heads` at position 0, if the result of `call` holds them."""
    axis, tensor = _heads_axis(block, call.result)
    width = heads.shape[-1]
    if tensor is None or tensor.shape[-1] % width:
        return None
    projection = Projection(Site(call.path, Port.OUTPUT), width, heads_axis=axis, clip=clip)
    pieces = (tensor if clip is None else tensor.clamp(-clip, clip)).reshape(block.tokens, -1, width)
    order = places(pieces[0], heads[:, 0], block.dtype, is_sorted=is_sorted)
    found = None if order is None else placed(projection, order, pieces.shape[1])
    return None if found is None or call.result is None else _with_factor(found, call.result, heads)


def _heads_axis(block: Block, seen: Seen | None) -> tuple[int | None, Tensor | None]:
    """Where a result has its heads, and the result as [token, width]; None where it is neither."""
    if seen is None:
        return None, None
    tensor, tokens = seen.value, block.tokens
    if tensor.ndim == 3 and tensor.shape[:2] == (1, tokens):
        return None, tensor[0]
    if tensor.ndim == 4 and tensor.shape[:2] == (1, tokens):
        return 2, tensor[0].flatten(1)
    if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[2] == tokens:
        return 1, tensor[0].transpose(0, 1).flatten(1)
    return None, None


def places(pieces: Tensor, heads: Tensor, dtype: torch.dtype, *, is_sorted: bool) -> list[int] | None:
    """Which of `pieces` [piece, width] points where each of `heads` [head, width] does; None unless all are found."""
    if is_sorted:
        pieces, heads = pieces.sort(dim=-1).values, heads.sort(dim=-1).values
    cosines = normalize(heads.double(), dim=-1) @ normalize(pieces.double(), dim=-1).T
    best = cosines.max(dim=1)
    inexact = 1e-3 if dtype in (torch.bfloat16, torch.float16) else 1e-9
    return _integers(best.indices) if bool((best.values > 1 - inexact).all()) else None


def placed(projection: Projection, order: list[int], pieces: int) -> Projection | None:
    """`projection` with the cut whose heads are the pieces `order`, of `pieces` in a row; None where there is none."""
    repeat = next((n for n, (one, other) in enumerate(pairwise(order), 1) if one != other), len(order))
    distinct = order[::repeat]
    count = next((n for n, (one, other) in enumerate(pairwise(distinct), 1) if other != one + 1), len(distinct))
    groups = len(distinct) // count
    size = pieces // groups
    taken = [group * size + order[0] + head for group in range(groups) for head in range(count)]
    if [place for place in taken for _ in range(repeat)] != order or pieces % groups or order[0] + count > size:
        return None
    return replace(projection, first=order[0], count=count, groups=groups, repeat=repeat)


def _with_factor(projection: Projection, seen: Seen, heads: Tensor) -> Projection:
    """`projection` with its factor, on layers that rotate nothing: there the op receives it times one number."""
    before, after = cut(seen.value, projection)[0].double(), heads.double()
    factor = float((before * after).sum() / (before * before).sum())
    alike = (factor * before - after).abs().amax() <= 1e-4 * after.abs().amax()
    return replace(projection, factor=factor) if alike and abs(factor - 1) > 1e-4 else projection


def _is_chained(calls: list[Call], call: Call) -> bool:
    """Whether nothing, such as a rotation, came between a norm of heads and what a module gave."""
    if not is_norm(call) or call.argument is None:
        return True
    taken = call.argument.value.float()
    makers = [other.result for other in calls if other.end < call.start and other.result is not None]
    return any(bool(torch.isin(taken, made.value.float()).all()) for made in makers)


def _rotates(block: Block, call: Call) -> bool:
    """Whether `call` is a rotation in a module of its own: it leaves directions at position 0 alone, and no others."""
    _, before = _heads_axis(block, call.argument)
    _, after = _heads_axis(block, call.result)
    if before is None or after is None or before.shape != after.shape:
        return False
    turned = (normalize(before.double(), dim=-1) - normalize(after.double(), dim=-1)).abs().amax(dim=-1)
    return bool(turned[0] < 1e-6 < turned[1:].max())


def _find_latent(block: Block, calls: list[Call], heads: Tensor) -> tuple[Projection, Projection] | None:
    """Keys of latent attention: per head a part without position, then a rotary part that all heads share."""
    for call in reversed(calls):
        own = _find_unrotated(block, call, heads)
        if own is None or own.columns is None:
            continue
        rest = heads[:, :, own.columns[1] - own.columns[0] :]
        shared = (_find_shared(block, other, rest) for other in calls)
        found = next((part for part in shared if part is not None), None)
        if found is not None:
            return own, found
    return None


def _find_unrotated(block: Block, call: Call, heads: Tensor) -> Projection | None:
    """The projection with the first components of every head, the same at all positions."""
    axis, tensor = _heads_axis(block, call.result)
    count = heads.shape[0]
    if tensor is None or tensor.shape[-1] % count:
        return None
    pieces = tensor.reshape(block.tokens, count, -1).transpose(0, 1)
    starts = _integers((pieces[0, 0] == heads[0, 0, 0]).nonzero().flatten())
    for start in starts:
        width = min(heads.shape[-1], pieces.shape[-1] - start)
        same = (pieces[..., start : start + width] == heads[..., :width]).flatten(0, 1).all(dim=0).to(torch.int64)
        run = int(same.cumprod(0).sum())
        if run:
            site = Site(call.path, Port.OUTPUT)
            return Projection(site, pieces.shape[-1], count=count, heads_axis=axis, columns=(start, start + run))
    return None


def _find_shared(block: Block, call: Call, rest: Tensor) -> Projection | None:
    """The projection with the last components of all heads, `rest` [head, token, width], before their rotation."""
    axis, tensor = _heads_axis(block, call.result)
    width = rest.shape[-1]
    if tensor is None or tensor.shape[-1] < width or not (rest == rest[:1]).all():
        return None
    windows = tensor[0].unfold(0, width, 1).sort(dim=-1).values
    starts = _integers((windows == rest[0, 0].sort().values).all(dim=-1).nonzero().flatten())
    if not starts:
        return None
    columns = (starts[0], starts[0] + width)
    site = Site(call.path, Port.OUTPUT)
    return Projection(site, tensor.shape[-1], heads_axis=axis, repeat=rest.shape[0], columns=columns)


def _integers(tensor: Tensor) -> list[int]:
    return cast("list[int]", tensor.tolist())
