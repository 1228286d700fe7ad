"""What a listener is told of one attention, and how what it replaces is put in its place.

Everything after a replacement is computed again, by the calls that the module itself made (`tape.py`); where nothing
is replaced, the module's own tensors go on. What the module keeps apart from the product with the values, such as a
pattern that it returns beside its output, is not computed again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from jackfield.engines.transformers.function_mode import unheard
from jackfield.engines.transformers.product import Heads, Layout, Product, repeated, same
from jackfield.engines.transformers.tape import Tape
from jackfield.errors import EditMismatch, Unavailable

CacheLayer = Callable[[], tuple[Tensor, Tensor] | None]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@runtime_checkable  # beartype, in tests, asks isinstance
class AttentionListener(Protocol):
    """What hears an attention of B requests, t rows and n keys. Every tensor is the module's own, or a view of it.

    None leaves things as they are. A replacement has the shape of what it replaces; its dtype becomes the module's.
    Nothing handed out may be changed in place.
    """

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Queries [B, H, t, d], keys [B, Hkv, n, d] and values [B, Hkv, n, dv], as the products receive them."""
        ...

    def scores(self, scores: Tensor) -> Tensor | None:
        """[B, H, t, n], exactly what enters the softmax: with the module's own mask, which may be a large negative."""
        ...

    def pattern(self, pattern: Tensor) -> Tensor | None:
        """[B, H, t, n] as it leaves the softmax, before dropout and casts."""
        ...

    def heads(self, z: Tensor) -> Tensor | None:
        """[B, t, H, dv]: the product of the pattern with the values."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, run: Run) -> Tensor:
        """Instead of all others, where the module calls `scaled_dot_product_attention`.

        `mask` [B or 1, H or 1, t, n] is boolean (True is seen) or added, with causality in it; None masks nothing.
        `run` is the module's own call, with other queries, keys or values where they are other tensors than those
        given. Returns [B, H, t, dv]: what `run` returned, or something in its place.
        """
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A product that queries and keys could have, and what the module has made of it so far."""

    product: Product
    tape: Tape


@dataclass(slots=True)
class Softmax:
    """A softmax of scores that came of a candidate, and what the module has made of the pattern so far."""

    origin: Candidate
    scores: Tensor
    pattern: Tensor
    again: Callable[[Tensor], Tensor]
    tail: Tape
    place: int  # of the scores, on the origin's tape

    def keep_from(self, written: Tensor) -> None:
        """Takes copies before the module writes over what is to be handed out."""
        if self.tail.place(written) is not None:
            self.pattern = self.pattern.clone()
        if self.origin.tape.place(written) is not None:
            self.scores = self.scores.clone()


@dataclass(frozen=True, slots=True)
class _Operand:
    """One input of an attention as the module has it, and as heads [B, heads, rows, width]."""

    name: str
    tensor: Tensor
    layout: Layout
    heads: Tensor

    def replaced(self, edited: Tensor) -> Tensor:
        """`edited` in the operand's shape, dtype and strides: so the product of an identity edit rounds as it did."""
        _check(edited, self.heads.shape, self.name)
        view = self.layout.apart(self.tensor)
        count = view.shape[:-2].numel() // edited.shape[0]
        whole = self.layout.together(repeated(edited, count).reshape(view.shape))
        return torch.empty_like(self.tensor).copy_(whole)


_Inputs = tuple[_Operand, _Operand, _Operand]  # queries, keys, values


@dataclass(frozen=True, slots=True)
class Teller:
    """Tells `listener` of the attention of the module called `name`."""

    name: str
    listener: AttentionListener
    cache_layer: CacheLayer | None
    heads: Heads

    def operands(self, scores: Product, output: Product) -> _Inputs | None:
        """The queries, keys and values of two products; None where they are not the heads that there should be."""
        return self._operands((scores.left, scores.right, output.right), (scores.rows, scores.columns, output.columns))

    def dispatched_operands(self, call: Mapping[str, Any]) -> _Inputs | None:
        """The same of a call of `scaled_dot_product_attention`."""
        tensors: tuple[Tensor, Tensor, Tensor] = (call["query"], call["key"], call["value"])
        layouts = tuple(Layout(tuple(range(tensor.ndim))) for tensor in tensors)
        return self._operands(tensors, layouts)

    def _operands(self, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> _Inputs | None:
        views = [layout.apart(tensor) for tensor, layout in zip(tensors, layouts, strict=True)]
        heads = (self.heads.queries(views[0]), self.heads.keys(views[1]), self.heads.keys(views[2]))
        found = [
            _Operand(name, tensor, layout, split)
            for name, tensor, layout, split in zip(("queries", "keys", "values"), tensors, layouts, heads, strict=True)
            if split is not None
        ]
        return (found[0], found[1], found[2]) if len(found) == 3 else None

    def told(self, softmax: Softmax, output: Product, operands: _Inputs) -> tuple[Tensor, bool]:
        """Asks for each part of an attention in turn; the result of `output`, and whether any part was replaced."""
        q, k, v = self._edited_inputs(operands)
        pattern = self._edited_pattern(softmax, q, k)
        left = output.left if pattern is None else softmax.tail.play(pattern, output.left)
        result = output.take(left, output.right if v is None else v)
        edited = self._edited_heads(output, result)
        replaced = any(edit is not None for edit in (pattern, v, edited))
        return result if edited is None else edited, replaced

    def _edited_inputs(self, operands: _Inputs) -> list[Tensor | None]:
        """What takes the place of the module's operands; None where it keeps its own."""
        with unheard():
            edits = self.listener.inputs(*(operand.heads for operand in operands))
        return [
            None if edit is None else self._put(edit, operand) for edit, operand in zip(edits, operands, strict=True)
        ]

    def _put(self, edited: Tensor, operand: _Operand) -> Tensor:
        layer = None if self.cache_layer is None or operand.name == "queries" else self.cache_layer()
        if layer is not None:
            edited = self._cached(edited, operand, layer[operand.name == "values"])
        return operand.replaced(edited)

    def _cached(self, edited: Tensor, operand: _Operand, cached: Tensor) -> Tensor:
        """Writes edited keys or values over those in the cache; returns them as it holds them, rounded to its dtype.

        A cache that keeps a window holds the last positions alone.
        """
        _check(edited, operand.heads.shape, operand.name)
        last = slice(-cached.shape[-2], None)
        held = repeated(operand.heads[:, :, last], cached.shape[1])
        if held.shape != cached.shape or not same(held.to(cached.dtype), cached):
            raise Unavailable(
                f"The {operand.name} of {self.name} cannot be edited: those it attends to are not those in its cache."
            )
        cached.copy_(repeated(edited[:, :, last], cached.shape[1]))
        return edited.to(cached.dtype)

    def _edited_pattern(self, softmax: Softmax, q: Tensor | None, k: Tensor | None) -> Tensor | None:
        """The pattern in place of the module's own, where it, or something before it, was edited."""
        scores = softmax.scores
        if q is not None or k is not None:
            product = softmax.origin.product
            taken = product.take(product.left if q is None else q, product.right if k is None else k)
            scores = softmax.origin.tape.play_to(taken, softmax.place)
        edited = self._asked(self.listener.scores, scores, "scores")
        scores = scores if edited is None else edited
        unchanged = scores is softmax.scores
        pattern = softmax.pattern if unchanged else softmax.again(scores)
        replacement = self._asked(self.listener.pattern, pattern, "pattern")
        return pattern if replacement is None and not unchanged else replacement

    def _asked(self, callback: Callable[[Tensor], Tensor | None], tensor: Tensor, what: str) -> Tensor | None:
        shown = self._whole(tensor)
        with unheard():
            replacement = callback(shown)
        return None if replacement is None else fitting(replacement, shown, what).reshape(tensor.shape)

    def _edited_heads(self, output: Product, result: Tensor) -> Tensor | None:
        view = output.out.apart(result)
        heads = self._whole(view)
        replacement = self._asked_of_heads(heads)
        return (
            None if replacement is None else _Operand("head outputs", result, output.out, heads).replaced(replacement)
        )

    def _asked_of_heads(self, heads: Tensor) -> Tensor | None:
        shown = heads.transpose(1, 2)
        with unheard():
            replacement = self.listener.heads(shown)
        return None if replacement is None else fitting(replacement, shown, "head outputs").transpose(1, 2)

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.heads.batch, self.heads.num_heads, *tensor.shape[-2:])

    def attend(self, call: Mapping[str, Any], operands: _Inputs) -> Tensor:
        """Hands a call of `scaled_dot_product_attention` over to the listener."""
        own: list[tuple[Tensor, Tensor]] = []

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tensors = [
                operand.tensor if edited is operand.heads else self._put(edited, operand)
                for edited, operand in zip((q, k, v), operands, strict=True)
            ]
            result = _dispatch({**call, **dict(zip(("query", "key", "value"), tensors, strict=True))})
            own.append((self._whole(result), result))
            return own[-1][0]

        q, k, v = (operand.heads for operand in operands)
        with unheard():
            z = self.listener.attend(q, k, v, _mask(call, q, k), _scale(call, q), run)
        results = [result for shown, result in own if shown is z]
        return results[0] if results else _returned(z, q, v, call["query"])


def _dispatch(call: Mapping[str, Any]) -> Tensor:
    return F.scaled_dot_product_attention(**call)


def _scale(call: Mapping[str, Any], q: Tensor) -> float:
    scale = call.get("scale")
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _mask(call: Mapping[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """The mask of a `scaled_dot_product_attention` as [B or 1, H or 1, t, n], causality included."""
    batch, heads, rows, _ = q.shape
    if call.get("is_causal"):  # torch aligns it to the first key, also where there are more keys than rows
        return torch.ones(1, 1, rows, k.shape[-2], dtype=torch.bool, device=q.device).tril()
    mask: Tensor | None = call.get("attn_mask")
    if mask is None:
        return None
    if call["query"].ndim == mask.ndim == 3 and mask.shape[0] != 1:  # heads folded into the batch
        return mask.reshape(batch, heads, *mask.shape[-2:])
    return mask[(None,) * (4 - mask.ndim)]


def _returned(z: Tensor, q: Tensor, v: Tensor, query: Tensor) -> Tensor:
    _check(z, (*q.shape[:-1], v.shape[-1]), "head outputs")
    return z.reshape(*query.shape[:-1], v.shape[-1]).to(query.dtype)


def fitting(replacement: Tensor, given: Tensor, what: str) -> Tensor:
    """A replacement in the dtype of what it replaces. Raises EditMismatch for another shape."""
    _check(replacement, given.shape, what)
    return replacement.to(given.dtype)


def _check(edited: Tensor, shape: Sequence[int], what: str) -> None:
    if tuple(edited.shape) != tuple(shape):
        raise EditMismatch(f"The {what} were edited with shape {tuple(edited.shape)}; they have shape {tuple(shape)}.")
