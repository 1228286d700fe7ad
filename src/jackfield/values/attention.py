"""The values of one layer's attention."""

from torch import Tensor

from jackfield.errors import UnknownValue
from jackfield.values.tree import Module, RawPort
from jackfield.values.value import Value


class AttentionValues:
    """What a layer and its attention answer for."""

    __slots__ = ()

    attention_queries_prerotary = Value(
        "1 H t d", "r", "after projection and query norm, before the rotary embedding", on="attention"
    )
    attention_keys_prerotary = Value(
        "1 Hkv t d", "r", "after projection and key norm, before the rotary embedding", on="attention"
    )
    attention_queries = Value("1 H t d", "rw", "as the attention op receives them", on="attention")
    attention_keys = Value(
        "1 Hkv t d", "rw", "this step's rows, as received; an edited row is what the cache holds", on="attention"
    )
    attention_values = Value(
        "1 Hkv t dv", "rw", "this step's rows, as received; an edited row is what the cache holds", on="attention"
    )
    attention_cached_keys = Value(
        "1 Hkv k d",
        "rw",
        "all of the request so far, out of the cache; NaN where a window has dropped a position",
        on="attention",
    )
    attention_cached_values = Value(
        "1 Hkv k dv",
        "rw",
        "all of the request so far, out of the cache; NaN where a window has dropped a position",
        on="attention",
    )
    attention_scores = Value(
        "1 H t k",
        "rw",
        "entering the softmax: scaled, soft-capped, biased, masked with -inf",
        on="attention",
        dtype="float32",
    )
    attention_probabilities = Value(
        "1 H t k", "rw", "the pattern; with sinks, rows sum to less than 1", on="attention", dtype="float32"
    )
    attention_head_outputs = Value("1 t H dv", "rw", "per head, before gate and output projection", on="attention")
    attention_premix = Value("1 t H dv", "rw", "the output projection's input, after any gate", on="attention")
    attention_head_results = Value("1 t H h", "r", "each head's part of the output projection's result", on="attention")


class AttentionOp(Module):
    """The attention op as vLLM has it: `.inputs` is ((q, k, v), kwargs), each [t, heads * width]."""

    __slots__ = ()
    inputs = RawPort("inputs")
    output = RawPort("output")


class Attention(AttentionValues, Module):
    """The attention of one layer: its values, and plain facts about it."""

    __slots__ = ()

    @property
    def attn(self) -> AttentionOp:
        """The attention op, by the name vLLM gives it."""
        return AttentionOp(self._server, f"{self._path}.attn", self._layer, self._call)

    @property
    def calls(self) -> tuple["Attention", ...]:
        """One part per call of the attention op: a layer that attends twice has two, each with values of its own."""
        count = self._server.attention(self._index).calls
        return tuple(Attention(self._server, self._path, self._layer, call) for call in range(count))

    @property
    def scale(self) -> float:
        """What query-key products are multiplied with."""
        scale = self._server.attention(self._index).scale
        return scale if scale is not None else self.head_dim**-0.5

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included; None: all."""
        return self._server.attention(self._index).window

    @property
    def softcap(self) -> float | None:
        """The soft cap on scores."""
        return self._server.attention(self._index).softcap

    @property
    def alibi_slopes(self) -> Tensor | None:
        """ALiBi's slope per head [head], float32; None without ALiBi."""
        return self._server.alibi_slopes(self._index)

    @property
    def sinks(self) -> Tensor | None:
        """The learned logit of each head's sink [head]; None without sinks."""
        return self._server.sinks(self._index)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._server.attention(self._index).num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self._server.attention(self._index).num_kv_heads

    @property
    def head_dim(self) -> int:
        """The width of a query or key."""
        return self._server.attention(self._index).d_head

    @property
    def _index(self) -> int:
        if self._layer is None:
            raise UnknownValue(f"{self!r} belongs to no layer.")
        return self._layer
