"""Where queries and keys are before the rotary embedding.

At position 0 the rotary embedding rotates by nothing. So of all tensors ahead of the attention op, the one whose first
token holds the first query of every head, up to a length, is the queries before the rotation. What linear modules and
norms inside the attention gave is looked at.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from jackfield.engines.transformers.heads import cut, placed, places
from jackfield.engines.vllm.seen import Seen, Tolerance
from jackfield.values.anatomy import Projection


def find_heads(made: Sequence[Seen], heads: Tensor, dtype: torch.dtype) -> Projection | None:
    """Which of `made`, in the order of the pass, holds `heads` [token, head, width] of the op before their rotation.

    None where none does. The rotations of some families sort the components of a head: order is left out where no
    tensor fits with it.
    """
    for is_sorted in (False, True):
        found = [each for each in (_holding(seen, heads, dtype, is_sorted=is_sorted) for seen in made) if each]
        if found:
            return _last_in_line(found)
    return None


def is_rotated(projection: Projection, made: Tensor, heads: Tensor, near: Tolerance) -> bool:
    """Whether `heads` [token, head, width] are more than a multiple of what `projection` cuts out of `made`."""
    before = _cut(projection, made)
    factor = (before * heads).sum() / before.square().sum()
    return not near.same(before * factor, heads)


def _holding(seen: Seen, heads: Tensor, dtype: torch.dtype, *, is_sorted: bool) -> tuple[Projection, Tensor] | None:
    width, (tokens, given) = heads.shape[-1], seen.x.shape
    if given % width or tokens != heads.shape[0]:
        return None
    pieces = seen.x.reshape(tokens, -1, width)
    order = places(pieces[0], heads[0], dtype, is_sorted=is_sorted)
    found = None if order is None else placed(Projection(seen.site, width), order, pieces.shape[1])
    return None if found is None else (found, _cut(found, seen.x))


def _last_in_line(found: Sequence[tuple[Projection, Tensor]]) -> Projection:
    """The last one that nothing but norms lies ahead of: a norm of heads may also come after the rotation."""
    best, heads = found[0]
    for projection, other in found[1:]:
        if torch.allclose(normalize(heads, dim=-1), normalize(other, dim=-1), atol=1e-3):
            best = projection
    return best


def _cut(projection: Projection, made: Tensor) -> Tensor:
    return cut(made[None], projection)[0].transpose(0, 1)
