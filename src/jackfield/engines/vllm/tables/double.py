"""What the kernel does, in torch: for devices that Triton has no code for, and to hold the kernel against."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jackfield.engines.vllm.tables.program import EDITS, Kind, Op
from jackfield.interventions import rows


def run(
    ops: Sequence[Op],
    x: Tensor,
    residual: Tensor | None,
    which: Tensor,
    keep: Callable[[Op, Tensor], None],
    stash: Tensor,
) -> None:
    """Carries out operations on the rows `which` [n] of `x` [row, width], and of its other half where it has one.

    `keep` takes what is captured or probed of these rows; `stash` [row, width] holds them from one site to a later one.
    """
    own = x[which]
    other = None if residual is None else residual[which]
    for op in ops:
        total = own + other if op.summed and other is not None else own
        here = total[:, op.start : op.start + op.width]
        if op.kind == Kind.STASH:
            stash[which] = here
        elif op.kind not in EDITS:
            keep(op, here if op.kind == Kind.CAPTURE else _probed(op, here))
        else:
            made = total.clone()
            made[:, op.start : op.start + op.width] = stash[which] if op.kind == Kind.RESTORE else _changed(op, here)
            changed = (made != total).any(-1, keepdim=True)
            own = torch.where(changed, made, own)
            if op.summed and other is not None:
                other = other.masked_fill(changed, 0)
    x[which] = own
    if residual is not None and other is not None:
        residual[which] = other


def _changed(op: Op, here: Tensor) -> Tensor:
    if op.kind == Kind.SCALE:
        return rows.scale(here, op.scale)
    assert op.numbers is not None
    vectors = op.numbers.vectors.to(here.device)
    if op.kind == Kind.PROJECT:
        return rows.project(here, vectors, op.scale)
    if op.kind == Kind.REPLACE:
        return rows.replace(here, vectors[0])
    return rows.steer(here, vectors[0], op.scale, op.kind == Kind.STEER_RELATIVE)


def _probed(op: Op, here: Tensor) -> Tensor:
    assert op.numbers is not None
    return rows.probe(here, op.numbers.vectors.to(here.device), op.numbers.bias.to(here.device))
