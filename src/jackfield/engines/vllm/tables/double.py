"""What the kernel does, in torch: for devices that Triton has no code for, and to hold the kernel against."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jackfield.engines.vllm.tables.ops import EDITS, Act, Kind, Op
from jackfield.interventions import rows


def run(
    ops: Sequence[Op],
    acts: Sequence[Act],
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
            keep(op, here if op.kind == Kind.CAPTURE else _probed(acts[op.act], here))
        else:
            made = total.clone()
            made[:, op.start : op.start + op.width] = (
                stash[which] if op.kind == Kind.RESTORE else _changed(op.kind, acts[op.act], here)
            )
            changed = (made != total).any(-1, keepdim=True)
            own = torch.where(changed, made, own)
            if op.summed and other is not None:
                other = other.masked_fill(changed, 0)
    x[which] = own
    if residual is not None and other is not None:
        residual[which] = other


def _changed(kind: Kind, act: Act, here: Tensor) -> Tensor:
    if kind == Kind.SCALE:
        return rows.scale(here, act.scale)
    assert act.numbers is not None
    vectors = act.numbers.vectors.to(here.device)
    if kind == Kind.PROJECT:
        return rows.project(here, vectors, act.scale)
    if kind == Kind.REPLACE:
        return rows.replace(here, vectors[0])
    return rows.steer(here, vectors[0], act.scale, kind == Kind.STEER_RELATIVE)


def _probed(act: Act, here: Tensor) -> Tensor:
    assert act.numbers is not None
    return rows.probe(here, act.numbers.vectors.to(here.device), act.numbers.bias.to(here.device))
