"""The kernel: one program per row of a batch carries out the operations of the row's recipe at one site.

It launches with the same arguments whatever the batch holds, so a CUDA graph keeps it: between replays only the
contents of the buffers change. `double.py` says the same in torch, and a test holds the two against each other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportUntypedFunctionDecorator=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: N803 - Triton's own language: arguments have no types, and constants are in capitals

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

AT_ONCE: Final = 8
"""Directions that are multiplied with a row in one go."""

STEER: Final = tl.constexpr(0)  # the numbers of program.Kind; a test compares them
STEER_RELATIVE: Final = tl.constexpr(1)
PROJECT: Final = tl.constexpr(2)
SCALE: Final = tl.constexpr(3)
REPLACE: Final = tl.constexpr(4)
CAPTURE: Final = tl.constexpr(5)
PROBE: Final = tl.constexpr(6)
STASH: Final = tl.constexpr(7)
RESTORE: Final = tl.constexpr(8)


@triton.jit
def _run(
    x,
    residual,
    slots,
    ranges,
    ops,
    numbers,
    captured,
    probed,
    stash,
    x_stride,
    residual_stride,
    ranges_stride,
    captured_stride,
    probed_stride,
    stash_stride,
    width,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    DIRECTIONS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    first = tl.load(ranges + slot * ranges_stride)
    last = tl.load(ranges + slot * ranges_stride + 1)
    if first == last:
        return
    dtype = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    direction = tl.arange(0, DIRECTIONS)
    own = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    other = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_RESIDUAL:
        other = tl.load(residual + row * residual_stride + column, mask=column < width, other=0.0).to(tl.float32)
    edited = 0
    for number in range(first, last):
        at = ops + number * 8
        kind = tl.load(at) & 15
        summed = tl.load(at) >> 4
        start = tl.load(at + 1)
        size = tl.load(at + 2)
        bank = numbers + tl.load(at + 3).to(tl.int64)
        count = tl.load(at + 4)
        place = tl.load(at + 5)
        scale = tl.load(at + 6).to(tl.float32, bitcast=True)
        inside = (column >= start) & (column < start + size)
        total = own
        if summed == 1:
            total = (own + other).to(dtype).to(tl.float32)
        here = tl.where(inside, total, 0.0)
        made = total
        if kind == STEER:
            made = total + scale * tl.load(bank + column - start, mask=inside, other=0.0)
        elif kind == STEER_RELATIVE:
            length = tl.sqrt(tl.sum(here * here, 0))
            made = total + scale * length * tl.load(bank + column - start, mask=inside, other=0.0)
        elif kind == PROJECT:
            part = tl.zeros([BLOCK], dtype=tl.float32)
            for begin in range(0, count, DIRECTIONS):
                which = begin + direction
                there = bank + which[:, None] * size + (column - start)[None, :]
                basis = tl.load(there, mask=(which < count)[:, None] & inside[None, :], other=0.0)
                part += tl.sum(tl.sum(basis * here[None, :], 1)[:, None] * basis, 0)
            made = total - scale * part
        elif kind == SCALE:
            made = scale * total
            if scale <= 0:
                made = tl.where(total == float("-inf"), total, made)
        elif kind == REPLACE:
            made = tl.load(bank + column - start, mask=inside, other=0.0)
        elif kind == CAPTURE:
            tl.store(captured + row * captured_stride + place + column - start, total.to(dtype), mask=inside)
        elif kind == PROBE:
            for begin in range(0, count, DIRECTIONS):
                which = begin + direction
                there = bank + which[:, None] * size + (column - start)[None, :]
                basis = tl.load(there, mask=(which < count)[:, None] & inside[None, :], other=0.0)
                bias = tl.load(bank + count * size + which, mask=which < count, other=0.0)
                products = tl.sum(basis * here[None, :], 1) + bias
                tl.store(probed + row * probed_stride + place + which, products, mask=which < count)
        elif kind == STASH:
            tl.store(stash + row * stash_stride + column, total.to(dtype), mask=inside)
        elif kind == RESTORE:
            made = tl.load(stash + row * stash_stride + column, mask=inside, other=0.0).to(tl.float32)
        made = tl.where(inside, made.to(dtype).to(tl.float32), total)
        is_edit = (kind <= REPLACE) | (kind == RESTORE)  # what is not a number differs from itself
        if is_edit & (tl.sum((made != total).to(tl.int32), 0) > 0):
            edited = 1
            own = made  # of a row that is no sum, the rest of it is as it was
            if summed == 1:
                other = tl.zeros([BLOCK], dtype=tl.float32)
    if edited == 1:
        tl.store(x + row * x_stride + column, own.to(dtype), mask=column < width)
        if HAS_RESIDUAL:
            tl.store(residual + row * residual_stride + column, other.to(dtype), mask=column < width)


def run(
    x: Tensor,
    residual: Tensor | None,
    slots: Tensor,
    ranges: Tensor,
    ops: Tensor,
    numbers: Tensor,
    captured: Tensor,
    probed: Tensor,
    stash: Tensor,
) -> None:
    """Launches the kernel on the rows of `x` [row, width], and of `residual` where the stream is in two halves.

    `slots` [row] are recipes, -1 for none; `ranges` [recipe, 2] is a view of one site's, from where to where in `ops`
    [n, 8]; `numbers` are float32. `captured`, `probed` and `stash` take a row for each row of `x`.
    """
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    kernel: Any = _run
    kernel[(x.shape[0],)](
        x,
        x if residual is None else residual,
        slots,
        ranges,
        ops,
        numbers,
        captured,
        probed,
        stash,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        ranges.stride(0),
        captured.stride(0),
        probed.stride(0),
        stash.stride(0),
        width,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        DIRECTIONS=AT_ONCE,
        num_warps=min(16, max(4, block // 256)),
    )
