"""The kernel: one program per row of a batch carries out the operations of the row's recipe at one site.

It launches with the same arguments whatever the batch holds, so a CUDA graph keeps it: between replays only the
contents of the buffers change. `double.py` says the same in torch, and a test holds the two against each other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportUntypedFunctionDecorator=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportIndexIssue=false
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
def _directions(bank, begin, count, size, inside, place, BLOCK: tl.constexpr, DIRECTIONS: tl.constexpr):
    """The next of an operation's vectors [direction, column], zero outside of them and of its columns."""
    which = begin + tl.arange(0, DIRECTIONS)
    there = bank + which[:, None] * size + place[None, :]
    return tl.load(there, mask=(which < count)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _changed(
    kind, total, inside, place, bank, size, count, scale, stash, BLOCK: tl.constexpr, DIRECTIONS: tl.constexpr
):
    """The row as an edit makes it, in float32; as it is, where the operation edits nothing."""
    here = tl.where(inside, total, 0.0)
    made = total
    if kind == STEER:
        made = total + scale * tl.load(bank + place, mask=inside, other=0.0)
    elif kind == STEER_RELATIVE:
        made = total + scale * tl.sqrt(tl.sum(here * here, 0)) * tl.load(bank + place, mask=inside, other=0.0)
    elif kind == PROJECT:
        part = tl.zeros([BLOCK], dtype=tl.float32)
        for begin in range(0, count, DIRECTIONS):
            basis = _directions(bank, begin, count, size, inside, place, BLOCK, DIRECTIONS)
            part += tl.sum(tl.sum(basis * here[None, :], 1)[:, None] * basis, 0)
        made = total - scale * part
    elif kind == SCALE:
        made = scale * total
        if scale <= 0:
            made = tl.where(total == float("-inf"), total, made)  # a masked score stays masked
    elif kind == REPLACE:
        made = tl.load(bank + place, mask=inside, other=0.0)
    elif kind == RESTORE:
        made = tl.load(stash + place, mask=inside, other=0.0).to(tl.float32)
    return made


@triton.jit
def _leave(
    kind,
    total,
    inside,
    place,
    bank,
    size,
    count,
    captured,
    probed,
    stash,
    BLOCK: tl.constexpr,
    DIRECTIONS: tl.constexpr,
):
    """What an operation that edits nothing leaves in the row's buffers."""
    if kind == CAPTURE:
        tl.store(captured + place, total.to(captured.dtype.element_ty), mask=inside)
    elif kind == PROBE:
        here = tl.where(inside, total, 0.0)
        for begin in range(0, count, DIRECTIONS):
            which = begin + tl.arange(0, DIRECTIONS)
            basis = _directions(bank, begin, count, size, inside, place, BLOCK, DIRECTIONS)
            bias = tl.load(bank + count * size + which, mask=which < count, other=0.0)
            tl.store(probed + which, tl.sum(basis * here[None, :], 1) + bias, mask=which < count)
    elif kind == STASH:
        tl.store(stash + place, total.to(stash.dtype.element_ty), mask=inside)


@triton.jit
def _run(
    x, residual, slots, ranges, ops, numbers, captured, probed, stash,
    x_stride, residual_stride, ranges_stride, captured_stride, probed_stride, stash_stride, width,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, DIRECTIONS: tl.constexpr,
):  # fmt: skip
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
    own = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    other = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_RESIDUAL:
        other = tl.load(residual + row * residual_stride + column, mask=column < width, other=0.0).to(tl.float32)
    edited = 0
    for number in range(first, last):
        at = ops + number * 8
        kind, summed = tl.load(at) & 15, tl.load(at) >> 4
        start, size, count = tl.load(at + 1), tl.load(at + 2), tl.load(at + 4)
        bank = numbers + tl.load(at + 3).to(tl.int64)
        scale = tl.load(at + 6).to(tl.float32, bitcast=True)
        inside = (column >= start) & (column < start + size)
        place = column - start
        total = own
        if summed == 1:
            total = (own + other).to(dtype).to(tl.float32)
        kept = tl.load(at + 5)
        here = captured + row * captured_stride + kept
        there = probed + row * probed_stride + kept
        stashed = stash + row * stash_stride
        _leave(kind, total, inside, place, bank, size, count, here, there, stashed, BLOCK, DIRECTIONS)
        made = _changed(kind, total, inside, place, bank, size, count, scale, stashed, BLOCK, DIRECTIONS)
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
