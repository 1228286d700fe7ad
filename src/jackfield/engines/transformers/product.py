"""The two products of an attention, whichever way they are written, and where the heads are in their operands.

`matmul` (also as `@`), `bmm`, `baddbmm` and `einsum` all multiply matrices [*lead, rows, inner] with [*lead, inner,
columns]. A `Product` says how each operand's axes stand to that, and can be taken again with other operands. `Heads`
then makes the leading axes [batch, heads], whether the module keeps them apart, folds them or groups them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.transformers.tape import Function, tensors_in

_OPERANDS: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "matmul": (("input", "other"), "input", "other"),
    "bmm": (("input", "mat2"), "input", "mat2"),
    "baddbmm": (("input", "batch1", "batch2"), "batch1", "batch2"),
}
"""By name: the positional parameters, and which of them are the left and the right operand."""

PRODUCTS: frozenset[Function] = frozenset(
    (torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.baddbmm)
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor's axes in the order [*lead, rows, columns]; `absent` ones it lacks, and is broadcast over."""

    order: tuple[int, ...]
    absent: tuple[int, ...] = ()

    def apart(self, tensor: Tensor) -> Tensor:
        """`tensor` as a view [*lead, rows, columns]."""
        view = tensor.permute(self.order)
        for axis in self.absent:
            view = view.unsqueeze(axis)
        return view

    def together(self, view: Tensor) -> Tensor:
        """The inverse of `apart`."""
        tensor = view.squeeze(self.absent) if self.absent else view
        return tensor.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


@dataclass(frozen=True, slots=True)
class Product:
    """A product as a module took it.

    `rows` lays the left operand out as [*lead, t, inner]; `columns` lays the right one out with its positions as rows,
    [*lead, n, width], for keys and values alike; `out` lays out the result.
    """

    left: Tensor
    right: Tensor
    rows: Layout
    columns: Layout
    out: Layout
    take: Callable[[Tensor, Tensor], Tensor]


def scores_product(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """The call as queries [*lead, t, d] times keys [*lead, n, d], its result as [*lead, t, n]; None if it cannot be."""
    if function is torch.einsum:
        return _einsum(args, _scores_layouts)
    return _matrices(function, args, kwargs, keys=True)


def output_product(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], is_pattern: Callable[[Any], bool]
) -> Product | None:
    """The call as a pattern [*lead, t, n] times values [*lead, n, dv]; None if its left operand is not a pattern."""
    if function is torch.einsum:
        return _einsum(args, _output_layouts, is_pattern)
    product = _matrices(function, args, kwargs, keys=False)
    return product if product is not None and is_pattern(product.left) else None


def _matrices(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], *, keys: bool) -> Product | None:
    names, left_name, right_name = _OPERANDS[function.__name__]
    call = dict(zip(names, args, strict=False)) | dict(kwargs)
    left, right = call.get(left_name), call.get(right_name)
    if "out" in kwargs or not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    if left.ndim != right.ndim or left.ndim < 3:
        return None

    def take(left: Tensor, right: Tensor) -> Tensor:
        new = call | {left_name: left, right_name: right}
        first = [new.pop(name) for name in names[:1]]  # a method takes its first by position only
        return function(*first, **new)

    plain = tuple(range(left.ndim))
    flipped = (*plain[:-2], plain[-1], plain[-2])
    return Product(left, right, Layout(plain), Layout(flipped if keys else plain), Layout(plain), take)


Layouts = tuple[Layout, Layout, Layout]


def _einsum(
    args: Sequence[Any],
    layouts: Callable[[str, str, str], Layouts | None],
    is_left: Callable[[Any], bool] = lambda _: True,
) -> Product | None:
    equation, operands = args[0], tuple(tensors_in(args[1:]))
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    ins, out = equation.replace(" ", "").split("->")
    terms = ins.split(",")
    for left, right in ((0, 1), (1, 0)):
        found = layouts(terms[left], terms[right], out)
        if found is not None and is_left(operands[left]):
            return _einsum_product(equation, operands, left, right, found)
    return None


def _einsum_product(equation: str, operands: Sequence[Tensor], left: int, right: int, layouts: Layouts) -> Product:
    def take(new_left: Tensor, new_right: Tensor) -> Tensor:
        return torch.einsum(equation, *((new_left, new_right) if left < right else (new_right, new_left)))

    return Product(operands[left], operands[right], *layouts, take)


def _scores_layouts(left: str, right: str, out: str) -> Layouts | None:
    """Of `lead t d, lead n d -> lead t n`, in any order of the letters of each operand."""
    lead, rows, columns = out[:-2], out[-2:-1], out[-1:]
    inner = (set(left) & set(right)) - set(out)
    if len(inner) != 1 or columns in left or rows in right:
        return None
    (width,) = inner
    return _layouts(left, right, out, (lead + rows + width, lead + columns + width, out))


def _output_layouts(left: str, right: str, out: str) -> Layouts | None:
    """Of `lead t n, lead n dv -> lead t dv`: the pattern in that order, the others in any."""
    lead, rows, inner = left[:-2], left[-2:-1], left[-1:]
    widths = set(right) - set(left)
    if len(widths) != 1 or inner in out or rows in right:
        return None
    (width,) = widths
    return _layouts(left, right, out, (left, lead + inner + width, lead + rows + width))


def _layouts(left: str, right: str, out: str, wanted: tuple[str, str, str]) -> Layouts | None:
    rows, columns, result = wanted
    if set(rows) != set(left) or set(result) != set(out) or not set(right) <= set(columns):
        return None
    if any(len(set(term)) != len(term) for term in (left, right, out)) or not set(columns[-2:]) <= set(right):
        return None
    return _layout(left, rows), _layout(right, columns), _layout(out, result)


def _layout(term: str, wanted: str) -> Layout:
    order = tuple(term.index(letter) for letter in wanted if letter in term)
    return Layout(order, tuple(axis for axis, letter in enumerate(wanted) if letter not in term))


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads an attention has, over how many requests."""

    batch: int
    num_heads: int
    num_kv_heads: int

    def split(self, view: Tensor, *counts: int) -> Tensor | None:
        """A view [*lead, rows, columns] as [batch, heads, rows, columns]; None if its heads are none of `counts`."""
        *lead, rows, columns = view.shape
        heads, rest = divmod(math.prod(lead), self.batch)
        if rest or heads not in counts or (len(lead) > 1 and lead[0] != self.batch):
            return None
        return view.reshape(self.batch, heads, rows, columns)

    def queries(self, view: Tensor) -> Tensor | None:
        """Queries, scores, a pattern or head outputs: every head's own."""
        return self.split(view, self.num_heads)

    def keys(self, view: Tensor) -> Tensor | None:
        """Keys or values [batch, kv_head, key, width]; None also where heads of one group differ."""
        split = self.split(view, self.num_kv_heads, self.num_heads)
        if split is None or split.shape[1] == self.num_kv_heads:
            return split
        return collapsed(split, self.num_kv_heads)


def collapsed(repeated: Tensor, num_kv_heads: int) -> Tensor | None:
    """[batch, head, ...] as [batch, kv_head, ...], one of each group; None where a group's heads differ."""
    batch, heads, *rest = repeated.shape
    groups = repeated.reshape(batch, num_kv_heads, heads // num_kv_heads, *rest)
    first = groups[:, :, :1]
    if groups.stride(2) != 0 and not same(groups, first.expand_as(groups)):
        return None
    return groups[:, :, 0]


def repeated(heads: Tensor, count: int) -> Tensor:
    """[batch, kv_head, ...] as [batch, count, ...], each head repeated for its group."""
    return heads.repeat_interleave(count // heads.shape[1], dim=1) if heads.shape[1] != count else heads


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in every entry, nan to nan."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
