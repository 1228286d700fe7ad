"""What passes through softmax attention, seen where each family computes it.

The pattern is what the model's own softmax returned and the scores are what it was given, in every family: inside an
attention module's forward there is one softmax per attention. Queries are seen at the attention interface or at the
family's own method, keys and values where they enter the cache, rotation where it happens.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any  # whatever attention functions take and return

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from tests.reference.families import Family
from tests.reference.places import Visit, input_of, output_of, padded_to, replaced

MASKED_BELOW = -1e30
"""Masks add the least float; some families divide afterwards, so it is not the least float that the softmax gets."""


@dataclass(slots=True)
class Call:
    """One attention module's forward in progress."""

    layer: int
    module: nn.Module
    queries: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    cached: bool = False
    rotated: dict[str, Tensor] = field(default_factory=dict)
    attended: int = 0
    scale: float | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the attention interface was called with; `sinks` [H] is the module's own parameter."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class AttentionTap:
    """Hands a visitor every attention value of one model; `begin` says which rows the next forward brings."""

    def __init__(self, family: Family, visit: Visit) -> None:
        self._family = family
        self._visit = visit
        self._call: Call | None = None
        self._tokens = 0
        self._keys = 0
        self.facts: dict[int, Facts] = {}

    def begin(self, tokens: int, keys: int) -> None:
        """The next forward has `tokens` rows, the last of `keys` positions."""
        self._tokens, self._keys = tokens, keys

    @contextmanager
    def listening(self, layers: dict[int, nn.Module], cache: Cache) -> Iterator[None]:
        """Hooks and patches in place. `layers` holds the modules whose forward attends."""
        with ExitStack() as stack:
            for layer, module in layers.items():
                self._listen_to(stack, layer, module)
            modeling = sys.modules[type(next(iter(layers.values()))).__module__]
            if self._family.queries_at == "interface":
                wrapped = self._interface(modeling.eager_attention_forward)
                stack.enter_context(replaced(modeling, "eager_attention_forward", wrapped))
            for name in self._family.rotary:
                stack.enter_context(replaced(modeling, name, self._rotary(getattr(modeling, name))))
            stack.enter_context(replaced(functional, "softmax", self._softmax(functional.softmax)))
            stack.enter_context(replaced(cache, "update", self._cache_update(cache.update)))
            yield

    def _listen_to(self, stack: ExitStack, layer: int, module: nn.Module) -> None:
        projection = module.get_submodule(self._family.output_projection)

        def enter(*_: Any) -> None:
            self._call = Call(layer, module)

        def leave(*_: Any) -> None:
            if self._call is not None and self._call.queries is not None:
                self._finish(self._call)
            self._call = None

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(input_of(projection, self._premix))
        self._listen_to_queries(stack, module)
        if self._family.prerotary_at_projections:
            stack.enter_context(output_of(module.q_proj, lambda x: self._projected("query", x)))
            stack.enter_context(output_of(module.k_proj, lambda x: self._projected("key", x)))

    def _listen_to_queries(self, stack: ExitStack, module: nn.Module) -> None:
        match self._family.queries_at:
            case "_attn" | "_upcast_and_reordered_attn" as name:
                stack.enter_context(replaced(module, name, self._own_attention(getattr(module, name))))
            case "_reshape":
                stack.enter_context(replaced(module, "_reshape", self._split_queries(module._reshape, heads_axis=1)))
            case "falcon" if not self._family.rotary:
                split = self._split_queries(module._split_heads, heads_axis=2)
                stack.enter_context(replaced(module, "_split_heads", split))
            case "Wqkv":
                stack.enter_context(output_of(module.Wqkv, self._queries_of_three))

    # Queries, keys and values.

    def _suffix(self, call: Call) -> str:
        return f"/{call.attended}" if self._family.calls > 1 else ""

    def _see(self, name: str, x: Tensor) -> Tensor:
        call = self._call
        assert call is not None, "a value of attention passed outside an attention module"
        return self._visit(call.layer, name, x)

    def _interface(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            call = self._call
            assert call is not None
            assert call.module is module
            suffix = self._suffix(call)
            call.scale, call.softcap = kwargs.get("scaling"), kwargs.get("softcap")
            if self._family.keys_at == "interface" or not call.cached:
                key = self._see_rows(f"attention_keys{suffix}", key)
                value = self._see_rows(f"attention_values{suffix}", value)
            call.queries = query = self._see(f"attention_queries{suffix}", query)
            call.keys, call.values = key, value
            if suffix:
                self._see_cached(call, suffix)
            output, weights = eager(module, query, key, value, attention_mask, **kwargs)
            output = self._see(f"attention_head_outputs{suffix}", output)
            call.attended += 1
            return output, weights

        return attend

    def _see_rows(self, name: str, x: Tensor) -> Tensor:
        """This step's rows of `x`, which holds all positions."""
        rows = x[:, :, -self._tokens :]
        changed = self._see(name, rows)
        return x if changed is rows else torch.cat([x[:, :, : -self._tokens], changed], dim=2)

    def _see_cached(self, call: Call, suffix: str) -> None:
        assert call.keys is not None
        assert call.values is not None
        self._see(f"attention_cached_keys{suffix}", padded_to(call.keys, self._keys, torch.nan, dim=2))
        self._see(f"attention_cached_values{suffix}", padded_to(call.values, self._keys, torch.nan, dim=2))

    def _own_attention(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        def own(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._call is not None
            self._call.queries = query = self._see("attention_queries", query)
            return attend(query, key, value, *args, **kwargs)

        return own

    def _split_queries(self, split: Callable[..., Any], heads_axis: int) -> Callable[..., Any]:
        def own(fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert self._call is not None
            query, key, value = split(fused)
            standard = query if heads_axis == 1 else query.transpose(1, 2)
            self._call.queries = changed = self._see("attention_queries", standard)
            if changed is not standard:
                query = changed if heads_axis == 1 else changed.transpose(1, 2)
            return query, key, value

        return own

    def _queries_of_three(self, fused: Tensor) -> Tensor:
        assert self._call is not None
        query, key, value = fused.chunk(3, dim=-1)
        standard = query.unflatten(-1, (self._call.module.n_heads, -1)).transpose(1, 2)
        self._call.queries = changed = self._see("attention_queries", standard)
        return fused if changed is standard else torch.cat([changed.transpose(1, 2).flatten(2), key, value], dim=-1)

    def _cache_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            call = self._call
            if call is None:
                return update(key, value, *args, **kwargs)
            call.cached = True
            if self._family.keys_at == "cache":
                key, value = self._see("attention_keys", key), self._see("attention_values", value)
            call.keys, call.values = update(key, value, *args, **kwargs)
            return call.keys, call.values

        return tapped

    # Rotation.

    def _rotary(self, rotate: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None:
                return rotate(first, *args, **kwargs)
            if self._family.rotary_order == "pair":
                call.rotated.update(query=first, key=args[0])
                result = rotate(first, *args, **kwargs)
                return self._rotated_queries(call, result) if self._family.queries_at == "falcon" else result
            order = ("query", "key") if self._family.rotary_order == "query first" else ("key", "query")
            call.rotated[order[len(call.rotated)]] = first
            return rotate(first, *args, **kwargs)

        return tapped

    def _rotated_queries(self, call: Call, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        query, key = result
        call.queries = self._see("attention_queries", query)
        return call.queries, key

    def _projected(self, which: str, x: Tensor) -> Tensor:
        call = self._call
        assert call is not None
        call.rotated[f"{which} projection"] = x.unflatten(-1, (-1, call.module.head_dim)).transpose(1, 2)
        return x

    def _prerotary(self, call: Call, which: str, received: Tensor) -> Tensor:
        """`received` with its rotated part as it was before: all of it, or the first or last channels of each head."""
        if self._family.prerotary_at_projections:
            return call.rotated[f"{which} projection"]
        if which not in call.rotated:
            return received
        before = call.rotated[which]
        before = before if self._family.rotary_heads_axis == 1 else before.transpose(1, 2)
        width = before.shape[-1]
        whole = received.clone()
        part = whole[..., -width:] if self._family.rotary_last else whole[..., :width]
        part.copy_(before)
        return whole

    # Scores, pattern and what heads write.

    def _softmax(self, softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def tapped(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            call = self._call
            if call is None:
                return softmax(logits, *args, **kwargs)
            edited, dead = self._see_scores(call, logits)
            pattern = softmax(edited, *args, **kwargs)
            pattern = pattern if dead is None else pattern.masked_fill(dead, 0.0)
            if self._family.sink == "scale":
                return self._see_scaled_pattern(call, logits, edited, pattern)
            return self._see_pattern(call, pattern)

        return tapped

    def _see_scores(self, call: Call, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The softmax's input after edits, and the rows that edits left with nothing to see."""
        assert call.keys is not None
        width = call.keys.shape[2]
        sink = logits[..., width:]
        masked = logits[..., :width] < MASKED_BELOW
        shift = self._shift(call, sink, masked) if self._family.sink == "column" else torch.zeros(())
        scores = (logits[..., :width].float() + shift).masked_fill(masked, -torch.inf)
        standard = padded_to(scores, self._keys, -torch.inf, dim=-1)
        changed = self._see(f"attention_scores{self._suffix(call)}", standard)
        if changed is standard:
            return logits, None
        scores = changed[..., -width:]
        dead = None if sink.shape[-1] else torch.isneginf(scores).all(-1, keepdim=True)
        return torch.cat([(scores - shift).to(logits.dtype), sink], dim=-1), dead

    def _shift(self, call: Call, sink: Tensor, masked: Tensor) -> Tensor:
        """What was taken off each row before its softmax: known from the sink, or else the maximum, found again."""
        if sink.shape[-1]:
            return call.module.sinks.reshape(1, -1, 1, 1) - sink
        assert call.queries is not None
        assert call.keys is not None
        assert call.scale is not None
        keys = call.keys.repeat_interleave(call.queries.shape[1] // call.keys.shape[1], dim=1)
        raw = call.queries @ keys.transpose(-1, -2) * call.scale
        return raw.masked_fill(masked, -torch.inf).amax(-1, keepdim=True)

    def _see_pattern(self, call: Call, pattern: Tensor) -> Tensor:
        assert call.keys is not None
        width = call.keys.shape[2]
        standard = padded_to(pattern[..., :width].float(), self._keys, 0.0, dim=-1)
        changed = self._see(f"attention_probabilities{self._suffix(call)}", standard)
        if changed is standard:
            return pattern
        return torch.cat([changed[..., -width:].to(pattern.dtype), pattern[..., width:]], dim=-1)

    def _see_scaled_pattern(self, call: Call, logits: Tensor, edited: Tensor, pattern: Tensor) -> Tensor:
        """A sink that scales what the head writes is a sink in the softmax: its share is off the pattern too.

        The model scales by what it saw before any edit, so an edited pattern is handed back without that.
        """
        now, before = (sink_share(call.module.sinks, x) for x in (edited, logits))
        seen = pattern * now
        changed = self._see_pattern(call, seen)
        return pattern if changed is seen and edited is logits else changed / before

    def _premix(self, x: Tensor) -> Tensor:
        call = self._call
        assert call is not None
        assert call.queries is not None
        standard = changed = x.unflatten(-1, (call.queries.shape[1], -1))
        if not call.attended:
            changed = self._see("attention_head_outputs", standard)
        changed = self._see("attention_premix", changed)
        self._see("attention_head_results", self._head_results(call.module, changed))
        return x if changed is standard else changed.flatten(2)

    def _head_results(self, module: nn.Module, premix: Tensor) -> Tensor:
        """Each head's rows of the projection's weight, applied by themselves: [1, t, H, h]."""
        projection = module.get_submodule(self._family.output_projection)
        weight = projection.weight.T if isinstance(projection, nn.Linear) else projection.weight  # Conv1D: [in, out]
        per_head = weight.unflatten(0, premix.shape[-2:])
        return torch.einsum("bthd,hdm->bthm", premix, per_head)

    def _finish(self, call: Call) -> None:
        """The values that are only read."""
        assert call.queries is not None
        assert call.keys is not None
        assert call.values is not None

        def see(name: str, x: Tensor) -> None:
            self._visit(call.layer, name, x)

        see("attention_queries_prerotary", self._prerotary(call, "query", call.queries))
        if call.cached:
            see("attention_keys_prerotary", self._prerotary(call, "key", call.keys[:, :, -self._tokens :]))
        if self._family.calls == 1:
            self._see_cached(call, "")
        sinks = getattr(call.module, "sinks", None)
        self.facts[call.layer] = Facts(call.scale, call.softcap, sinks)


def sink_share(sinks: Tensor, logits: Tensor) -> Tensor:
    """What a sink [H] leaves of each row of `logits` [1, H, t, k]: sum(exp(row)) / (sum(exp(row)) + exp(sink))."""
    return (logits.float().logsumexp(-1, keepdim=True) - sinks.float().reshape(1, -1, 1, 1)).sigmoid()
