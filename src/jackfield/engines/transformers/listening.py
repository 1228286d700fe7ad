"""Attention that does not go through transformers' attention interface, heard as the operations it is made of.

A module that computes its own attention multiplies queries with keys, does something to the product (scales it, adds a
bias, masks it), takes a softmax over the last axis, perhaps drops or casts, and multiplies with values. A torch
function mode, active during that module's forward and only there, follows the tensors from one product to the other
by their identity. At the second product everything is known that a block may want, and the listener is told, in order,
of the queries, keys and values, the scores, the pattern and the head outputs (`telling.py`). Where it replaces nothing,
no bit changes. A module that calls `scaled_dot_product_attention` itself is heard at that call.

This is not for modules that use the interface, and it does not see inside compiled code or custom kernels. Where an
attention is not understood, nothing is handed out, and `Listening.missing` says why.

    with listen(module, listener, lambda: (layer.keys, layer.values), num_heads, num_kv_heads, batch) as heard:
        output = module.forward(hidden_states, ...)
    if heard.missing is not None:
        raise Unavailable(heard.missing)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jackfield.engines.transformers.function_mode import ListeningMode, unheard
from jackfield.engines.transformers.product import PRODUCTS, Heads, Product, output_product, scores_product
from jackfield.engines.transformers.tape import Function, Tape, tensors_in, written_by
from jackfield.engines.transformers.telling import AttentionListener, CacheLayer, Candidate, Softmax, Teller, fitting
from jackfield.errors import Unavailable

__all__ = ["AttentionListener", "CacheLayer", "Listening", "ProjectionListening", "listen", "listen_projection"]

# Torch's functions are typed in part: the stubs know nothing of torch.special.softmax.
_SOFTMAXES: frozenset[Any] = frozenset((F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax))  # pyright: ignore
_MATRIX_PRODUCTS: frozenset[Any] = frozenset(
    (torch.matmul, torch.mm, torch.addmm, Tensor.matmul, Tensor.mm, Tensor.addmm)
)
_UNHEARD = "no product of queries and keys, softmax over the last axis and product with values was seen in its forward"


def listen(
    module: nn.Module,
    listener: AttentionListener,
    cache_layer: CacheLayer | None,
    num_heads: int,
    num_kv_heads: int,
    batch: int,
) -> "Listening":
    """A context for one forward of `module`, in which `listener` hears its attention.

    `cache_layer` gives the keys and values [batch, kv_head, key, width] that the cache holds of this layer once the
    forward has updated it; edited keys and values are written over them. None, given or called: there is no cache, and
    edits end with this forward. Keys that the module repeats for each query head are handed out once per group, and
    edits reach every repeat.

    Raises, out of the forward: EditMismatch for a replacement of another shape, and Unavailable for an edit of keys or
    values that are not what the cache holds (with a rotary embedding after the cache, say).
    """
    return Listening(Teller(type(module).__name__, listener, cache_layer, Heads(batch, num_heads, num_kv_heads)))


def listen_projection(module: nn.Module, callback: Callable[[Tensor], Tensor | None]) -> "ProjectionListening":
    """A context for one forward of `module`, a router: `callback` gets the result of its first linear product.

    That is `F.linear`, or a matrix product with two-dimensional weights. What the callback returns, unless None, flows
    on in its place, in its dtype; another shape raises EditMismatch out of the forward.
    """
    return ProjectionListening(type(module).__name__, callback)


class ProjectionListening(ListeningMode):
    """One forward of a router. `missing` says why nothing was handed out."""

    def __init__(self, name: str, callback: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._name = name
        self._callback = callback
        self._found = False

    @property
    def missing(self) -> str | None:
        """Why nothing was handed out; None when it was."""
        return None if self._found else f"The router logits of {self._name} cannot be read: it takes no linear product."

    def hear(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Hands out the first linear product."""
        result = function(*args, **kwargs)
        if self._found or not _is_linear(function, args, kwargs):
            return result
        self._found = True
        with unheard():
            replacement = self._callback(result)
        return result if replacement is None else fitting(replacement, result, "router logits")


def _is_linear(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if function is F.linear:
        return True
    operands = [*tensors_in(args), *tensors_in(kwargs)] if function in _MATRIX_PRODUCTS else []
    return bool(operands) and operands[-1].ndim == 2


class Listening(ListeningMode):
    """The attention of one forward. `calls` counts the attentions handed out; `missing` says why one was not."""

    def __init__(self, teller: Teller) -> None:
        super().__init__()
        self.calls = 0
        self._teller = teller
        self._refused: str | None = None
        self._candidates: list[Candidate] = []
        self._softmaxes: list[Softmax] = []
        self._spent: list[tuple[Tape, bool]] = []  # tapes of patterns handed out, and whether a part was replaced

    @property
    def missing(self) -> str | None:
        """Why something of this forward's attention was not handed out; None when all was."""
        reason = self._refused or (None if self.calls else _UNHEARD)
        return None if reason is None else f"The attention of {self._teller.name} cannot be read: {reason}."

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._candidates, self._softmaxes, self._spent = [], [], []

    def hear(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Makes the call, and follows what comes of it."""
        if function is F.scaled_dot_product_attention:
            return self._dispatched(args, kwargs)
        if function in PRODUCTS:
            return self._multiplied(function, args, kwargs)
        if not self._candidates and not self._softmaxes:
            return function(*args, **kwargs)
        if function in _SOFTMAXES:
            return self._softmaxed(function, args, kwargs)
        return self._followed(function, args, kwargs)

    def _dispatched(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        call: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        operands = self._teller.dispatched_operands(call)
        if operands is None:
            self._refuse(self._other_heads())
            return F.scaled_dot_product_attention(*args, **kwargs)
        self.calls += 1
        return self._teller.attend(call, operands)

    def _multiplied(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        output = output_product(function, args, kwargs, self._is_pattern)
        if output is not None:
            return self._attended(output)
        product = scores_product(function, args, kwargs)
        if product is None or not self._could_be_scores(product):
            return self._followed(function, args, kwargs)
        result = function(*args, **kwargs)
        self._candidates.append(Candidate(product, Tape(result)))
        return result

    def _could_be_scores(self, product: Product) -> bool:
        heads = self._teller.heads
        keys = heads.split(product.columns.apart(product.right), heads.num_kv_heads, heads.num_heads)
        return keys is not None and heads.queries(product.rows.apart(product.left)) is not None

    def _softmaxed(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call: dict[str, Any] = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
        scores: Tensor = call["input"]
        origin = next((item for item in self._candidates if item.tape.place(scores) is not None), None)
        if origin is None or call.get("dim") not in (-1, scores.ndim - 1):
            return self._followed(function, args, kwargs)
        pattern = function(*args, **kwargs)
        if not self._refuse(origin.tape.unfaithful or self._misfit(origin.product, scores)):
            self._candidates.remove(origin)
            again = _softmax_of(function, args, kwargs)
            self._softmaxes.append(
                Softmax(origin, scores, pattern, again, Tape(pattern), origin.tape.known_place(scores))
            )
        return pattern

    def _misfit(self, product: Product, scores: Tensor) -> str | None:
        rows, keys = product.rows.apart(product.left).shape[-2], product.columns.apart(product.right).shape[-2]
        if tuple(scores.shape[-2:]) == (rows, keys) and self._teller.heads.queries(scores) is not None:
            return None
        return f"its softmax has shape {tuple(scores.shape)}, for {rows} rows and {keys} keys"

    def _attended(self, output: Product) -> Tensor:
        softmax = next((item for item in self._softmaxes if item.tail.place(output.left) is not None), None)
        if softmax is None:
            return self._attended_again(output)
        operands = self._teller.operands(softmax.origin.product, output)
        if self._refuse(softmax.tail.unfaithful) or operands is None:
            self._refuse(self._other_heads())
            return output.take(output.left, output.right)
        self.calls += 1
        self._softmaxes.remove(softmax)
        result, replaced = self._teller.told(softmax, output, operands)
        self._spent.append((softmax.tail, replaced))
        return result

    def _attended_again(self, output: Product) -> Tensor:
        reason = "it multiplies one pattern with values more than once"
        if any(replaced for tape, replaced in self._spent if tape.place(output.left) is not None):
            raise Unavailable(f"The attention of {self._teller.name} cannot be edited: {reason}.")
        self._refuse(reason)
        return output.take(output.left, output.right)

    def _followed(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = [*tensors_in(args), *tensors_in(kwargs)]
        tapes = [tape for tape in self._tapes() if any(tape.place(tensor) is not None for tensor in given)]
        written = written_by(function, args, kwargs)
        if written is not None:
            for softmax in self._softmaxes:
                softmax.keep_from(written)
        result = function(*args, **kwargs)
        for tape in tapes:
            tape.record(function, args, kwargs, result)
            if len(tapes) > 1:
                tape.unfaithful = "it puts several products, or several patterns, together"
        return result

    def _tapes(self) -> Iterator[Tape]:
        yield from (candidate.tape for candidate in self._candidates)
        yield from (softmax.tail for softmax in self._softmaxes)

    def _is_pattern(self, tensor: Any) -> bool:
        tapes = (*(softmax.tail for softmax in self._softmaxes), *(tape for tape, _ in self._spent))
        return isinstance(tensor, Tensor) and any(tape.place(tensor) is not None for tape in tapes)

    def _refuse(self, reason: str | None) -> bool:
        self._refused = self._refused or reason
        return reason is not None

    def _other_heads(self) -> str:
        heads = self._teller.heads
        return (
            f"its queries, keys and values are not {heads.num_heads} and {heads.num_kv_heads} heads of {heads.batch} "
            "requests, or the keys or values that it repeats differ within a group"
        )


def _softmax_of(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """The call with other scores."""
    rest = {name: argument for name, argument in kwargs.items() if name != "input"}
    return lambda scores: function(scores, *args[1:], **rest)
