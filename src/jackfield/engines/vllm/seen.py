"""What the probe saw pass, and how near two tensors of it must be to be one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from jackfield.interleave.site import Site


@dataclass(frozen=True, slots=True)
class Seen:
    """What passed a site in the probe: [row, width], float32; `residual` is the stream's other half, if it has two."""

    site: Site
    x: Tensor
    residual: Tensor | None = None

    def stream(self, *, summed: bool) -> Tensor:
        """The stream at this site."""
        return self.x if self.residual is None or not summed else self.x + self.residual


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far from a sum its parts may be, by the dtype the model computes in.

    `relative` is of the sum's own length; `rounding` of the length of the stream that it was added to and taken out of
    again, which in bfloat16 may be a hundred times as long.
    """

    relative: float
    rounding: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Tolerance":
        """A few roundings: measured on tiny and sample models, then doubled."""
        return cls(2e-4 if dtype == torch.float32 else 2e-2, torch.finfo(dtype).eps)

    def same(self, left: Tensor, right: Tensor, stream: Tensor | None = None) -> bool:
        """Whether two tensors are one, but for rounding; `stream` is what one of them is a difference of."""
        if left.shape != right.shape:
            return False
        beside = 0.0 if stream is None else self.rounding * _length(stream)
        return _length(left - right) <= self.relative * _length(right) + beside


def _length(tensor: Tensor) -> float:
    return float(tensor.square().sum().sqrt())
