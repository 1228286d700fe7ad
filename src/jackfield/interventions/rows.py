"""What each kind of intervention does to a row: the one definition, which every engine runs or is held against.

A row is the last axis of `x`. What is added or taken away is computed in float32 (float64 for a float64 model), and
the result is rounded once, to the dtype of `x`. Nothing is changed in place; all tensors are on the device of `x`.
"""

from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Rows = Float[Tensor, "*row width"]
Vector = Float[Tensor, " width"]
Directions = Float[Tensor, "direction width"]


def steer(x: Rows, vector: Vector, scale: float, relative: bool) -> Rows:
    """X + scale * vector; `relative`: x + scale * |x| * vector, with the Euclidean norm of each row."""
    wide = _wide(x)
    if not relative:
        return (wide + scale * vector).to(x.dtype)
    return (wide + scale * _lengths(wide) * vector).to(x.dtype)


def project(x: Rows, basis: Directions, strength: float) -> Rows:
    """X minus `strength` times its part in the span of `basis`, whose rows are orthonormal."""
    wide = _wide(x)
    basis = basis.to(wide.dtype)
    return (wide - strength * (wide @ basis.T) @ basis).to(x.dtype)


def scale(x: Rows, factor: float) -> Rows:
    """Factor * x. An entry of -inf, which is a masked score, stays what it is whatever the factor."""
    scaled = (factor * _wide(x)).to(x.dtype)
    return scaled if factor > 0 else torch.where(torch.isneginf(x), x, scaled)


def replace(x: Rows, value: Vector) -> Rows:
    """`value`, in every row."""
    return value.to(x.dtype).expand_as(x).clone()


def knock_out(scores: Float[Tensor, "*row key"], keys: Bool[Tensor, " key"]) -> Float[Tensor, "*row key"]:
    """The scores, with -inf at `keys`."""
    return scores.masked_fill(keys, -torch.inf)


def probe(x: Rows, directions: Directions, bias: Float[Tensor, " direction"] | None) -> Float[Tensor, "*row direction"]:
    """Each row's product with each direction, plus `bias`, in float32 (float64 for a float64 model)."""
    wide = _wide(x)
    products = wide @ directions.to(wide.dtype).T
    return products if bias is None else products + bias


def orthonormal(directions: Directions) -> Float[Tensor, "rank width"]:
    """An orthonormal basis of the span, in the dtype of `directions`; empty where all of them are zero.

    Directions are brought to one length first, so that a short one counts as much as a long one. What is left of a
    direction after the others is dropped where it is no more than float32's rounding of the rest.
    """
    long = directions.double()
    lengths = _lengths(long)
    unit = (long / lengths)[lengths[:, 0] > 0]
    if not len(unit):
        return directions[:0]
    _, strengths, basis = cast("tuple[Tensor, Tensor, Tensor]", torch.linalg.svd(unit, full_matrices=False))
    least = strengths[0] * max(unit.shape) * torch.finfo(torch.float32).eps
    return basis[strengths > least].to(directions.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _lengths(x: Float[Tensor, "*row width"]) -> Float[Tensor, "*row 1"]:
    return cast("Tensor", torch.linalg.vector_norm(x, dim=-1, keepdim=True))
