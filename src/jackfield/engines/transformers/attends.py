"""What each attention was given, and with what scale, window and soft cap: out of a recording.

An attention that goes through the attention interface of transformers says all of it in the call. Any other is found by
its softmax: the product before it holds queries and keys, the one after it the values; or by torch's own attention.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from jackfield.engines.transformers.dataflow import least_squares
from jackfield.engines.transformers.recording import (
    ATTENTION_OPERATION,
    PRODUCTS,
    Call,
    InterfaceCall,
    Operation,
    Recording,
    Seen,
)

_MASKED = -1e4
"""Scores at or below it are masked: by -inf, or by the lowest number of some dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """One attention op inside the module at `path`.

    `queries` [head, token, d_head], `keys` [kv_head, token, d_head], `values` [kv_head, token, d_value] and, where they
    were seen, `heads` [head, token, d_value] are as the op received and gave them.
    """

    path: str
    index: int
    dispatched: bool
    queries: Tensor
    keys: Tensor
    values: Tensor
    heads: Tensor | None
    scale: float | None
    window: int | None
    softcap: float | None
    passed: frozenset[str]


def find_attends(recording: Recording, modules: Mapping[str, nn.Module]) -> list[Attend]:
    """Every attention op of a recording, in order."""
    dispatched = [_dispatched(call) for call in recording.interface_calls if call.queries.value.ndim == 4]
    fused = [_fused(operation, recording.tokens) for operation in recording.operations]
    by_hand = [*(attend for attend in fused if attend), *_own(recording, modules)]
    return sorted(
        [*dispatched, *(_collapsed(attend, recording.cache) for attend in by_hand)], key=lambda attend: attend.index
    )


def not_understood(recording: Recording, mixer: Call) -> str | None:
    """Why `mixer`, in which no attention op was found, may be one all the same; None where it shows no sign of it."""
    inside = [operation for operation in recording.operations if mixer.start < operation.index < mixer.end]
    softmax = next((operation for operation in inside if operation.name == "softmax"), None)
    if softmax is not None:
        return (
            f"its softmax, over {list(softmax.output.value.shape)}, does not stand between one product of queries and "
            "keys and one with values"
        )
    products = (operation for operation in inside if operation.name in PRODUCTS and len(operation.inputs) > 1)
    if any(_is_pattern(seen.value, recording.tokens) for product in products for seen in product.inputs):
        return (
            "it multiplies values with weights that sum to 1 over the keys, and makes them by something else than "
            "torch's softmax, such as exp: what enters that cannot be told"
        )
    return None


def _is_pattern(weights: Tensor, tokens: int) -> bool:
    """Whether each token has, in the last axis, weights for all tokens that are none below 0 and sum to 1."""
    if weights.ndim < 3 or weights.shape[-2:] != (tokens, tokens) or not weights.is_floating_point():
        return False
    sums = weights.double().sum(dim=-1)
    return bool((weights >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)


def ends_with(heads: Tensor, cached: object) -> bool:
    """Whether `cached` [1, head, key, width] holds the last rows of `heads` [head, key, width]."""
    if not isinstance(cached, Tensor) or cached.ndim != 4:
        return False
    count = cached.shape[2]
    if not 0 < count <= heads.shape[1] or cached.shape[1:] != (heads.shape[0], count, heads.shape[2]):
        return False
    return torch.equal(cached[0].detach().to("cpu"), heads[:, -count:].to(cached.dtype))


def _collapsed(attend: Attend, cache: object) -> Attend:
    """`attend` with one key and value head per group, where a module repeats them for its op.

    Not where the cache holds them repeated: there each is a head of its own.
    """
    count = attend.keys.shape[0]
    layers = getattr(cache, "layers", ())  # foreign: transformers.Cache from 4.56
    held = any(ends_with(attend.keys, getattr(layer, "keys", None)) for layer in layers)
    if held or attend.values.shape[0] != count:
        return attend
    for groups in (size for size in range(count, 1, -1) if count % size == 0):
        if _repeats(attend.keys, groups) and _repeats(attend.values, groups):
            return replace(attend, keys=attend.keys[::groups], values=attend.values[::groups])
    return attend


def _repeats(heads: Tensor, groups: int) -> bool:
    return torch.equal(heads, heads[::groups].repeat_interleave(groups, dim=0))


def _dispatched(call: InterfaceCall) -> Attend:
    queries = call.queries.value[0]
    heads = None if call.result is None else call.result.value[0].transpose(0, 1)
    return Attend(
        path=call.path,
        index=call.index,
        dispatched=True,
        queries=queries,
        keys=call.keys.value[0],
        values=call.values.value[0],
        heads=heads if heads is not None and heads.shape[0] == queries.shape[0] else None,
        scale=_scale(call.keywords.get("scaling"), queries.shape[-1]),
        window=_whole(call.keywords.get("sliding_window")),
        softcap=_number(call.keywords.get("softcap")),
        passed=frozenset(call.keywords),
    )


def _fused(operation: Operation, tokens: int) -> Attend | None:
    if operation.name != ATTENTION_OPERATION:
        return None
    queries, keys, values = (_by_head(seen, tokens) for seen in operation.inputs[:3])
    heads = _by_head(operation.output, tokens)
    if queries is None or keys is None or values is None:
        return None
    scale = _scale(operation.keywords.get("scale"), queries.shape[-1])
    return Attend(operation.path, operation.index, False, queries, keys, values, heads, scale, None, None, frozenset())


def _own(recording: Recording, modules: Mapping[str, nn.Module]) -> Iterator[Attend]:
    """The attentions that compute their own softmax, out of what else the same module computes."""
    by_path: dict[str, list[Operation]] = {}
    for operation in recording.operations:
        by_path.setdefault(operation.path, []).append(operation)
    for path, operations in by_path.items():
        softmaxes = [operation for operation in operations if operation.name == "softmax"]
        for softmax in softmaxes:
            attend = _around(softmax, operations, recording.tokens, modules[path])
            if attend is not None:
                yield attend


def _around(softmax: Operation, operations: list[Operation], tokens: int, module: nn.Module) -> Attend | None:
    size, shape = softmax.output.value.numel(), softmax.output.value.shape
    if len(shape) < 3 or shape[-2:] != (tokens, tokens):
        return None
    products = [operation for operation in operations if operation.name in PRODUCTS and len(operation.inputs) > 1]
    before = [item for item in products if item.index < softmax.index and item.output.value.numel() == size]
    after = [item for item in products if item.index > softmax.index and item.inputs[0].value.numel() == size]
    if not before or not after:
        return None
    queries, keys = (_by_head(seen, tokens) for seen in before[-1].inputs[-2:])
    values, heads = _by_head(after[0].inputs[-1], tokens), _by_head(after[0].output, tokens)
    if queries is None or keys is None or values is None or keys.shape[-1] != queries.shape[-1]:
        return None
    scores = softmax.inputs[0].value.reshape(-1, tokens, tokens)
    return Attend(
        path=softmax.path,
        index=before[-1].index,
        dispatched=False,
        queries=queries,
        keys=keys,
        values=values,
        heads=heads,
        scale=_scale_of(scores, queries, keys, module),
        window=_band(module),
        softcap=None,
        passed=frozenset(),
    )


def _by_head(seen: Seen, tokens: int) -> Tensor | None:
    """[head, token, width] of a tensor of one prompt, whichever way its heads and its width stand."""
    tensor = seen.value[0] if seen.value.ndim == 4 else seen.value
    if tensor.ndim != 3 or tokens not in tensor.shape:
        return None
    if tensor.shape[1] == tokens:
        return tensor
    return tensor.transpose(1, 2) if tensor.shape[2] == tokens else tensor.transpose(0, 1)


def _scale_of(scores: Tensor, queries: Tensor, keys: Tensor, module: nn.Module) -> float | None:
    """What the module multiplies its scores with: a number it holds, or its inverse, that explains them.

    ALiBi adds a slope per key and a constant per query; both are fitted beside the scale.
    """
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], dim=0)
    raw = torch.einsum("hqd,hkd->hqk", queries.double(), keys.double())
    fits = [_fit(raw[head], scores[head].double()) for head in range(queries.shape[0])]
    fit = sorted(fits)[len(fits) // 2]
    width = queries.shape[-1]
    held = (_number(value) for value in vars(module).values())
    known = [1.0, width**-0.5, *(sign for value in held if value for sign in (value, 1 / value))]
    nearest = min(known, key=lambda value: abs(value - fit))
    return nearest if abs(nearest - fit) <= 1e-3 * abs(fit) else None


def _fit(raw: Tensor, scores: Tensor) -> float:
    """The factor of `raw` in `scores`, both [query, key], on the keys that each query sees."""
    tokens = raw.shape[0]
    query, key = torch.tril_indices(tokens, tokens)
    seen = scores[query, key] > _MASKED  # a window hides some of the triangle
    query, key = query[seen], key[seen]
    constants = torch.nn.functional.one_hot(query, tokens).double()
    columns = torch.cat([raw[query, key, None], key[:, None].double(), constants], dim=1)
    scales = columns.square().sum(dim=0).sqrt()
    factors = least_squares(columns / scales, scores[query, key])
    return float(factors[0] / scales[0])


def _band(module: nn.Module) -> int | None:
    """The window of a causal mask [.., token, token] that the module keeps in a buffer; None for a full triangle."""
    for buffer in module.buffers(recurse=False):
        if buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1 and buffer.dtype in (torch.bool, torch.uint8):
            last = int(buffer.reshape(-1, buffer.shape[-1])[-1].sum())
            return last if last < buffer.shape[-1] else None
    return None


def _scale(passed: object, width: int) -> float | None:
    """The scale as passed; attention functions take 1/sqrt(width) where none is."""
    return 1 / math.sqrt(width) if passed is None else _number(passed)


def _number(value: object) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
