"""Grouped-query attention, with its cache: what docs/llama.md walks through.

What attention is given, queries, keys and values, before and after the rotary embedding, is announced together.
"""

import math
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from jackfield.axes import HeadOutputs, Pattern, Queries, Stream
from jackfield.engines.llama.args import ModelArgs
from jackfield.engines.llama.parallel import ColumnParallelLinear, RowParallelLinear, cut, gather, share
from jackfield.engines.llama.rotary import Frequencies, apply_rotary_emb, hidden, shown
from jackfield.engines.llama.tapped import Tap, Tapped, wide
from jackfield.errors import InvalidRequest, RequestTooLong

Mask: TypeAlias = Float[Tensor, "*batch token key"] | Literal["causal"] | None
"""What is added to the scores; "causal": as many keys as queries, each sees up to itself; None: all see all."""


def repeat_kv(x: HeadOutputs, n_rep: int) -> HeadOutputs:
    """[batch, token, kv_head, d] to [batch, token, kv_head * n_rep, d]: query head h uses kv head h // n_rep."""
    return x.repeat_interleave(n_rep, dim=2)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Float[Tensor, "token key"]:
    """0 up to a query's own position, -inf after it; the queries are the last of the positions."""
    return torch.full((num_queries, num_keys), -math.inf, device=device).triu(1 + num_keys - num_queries)


def attention_scores(queries: Queries, keys: Queries, mask: Mask) -> Pattern:
    """What enters the softmax, float32: scaled products plus the mask. One key head for each query head."""
    scores = wide(queries) @ wide(keys).transpose(-2, -1) * queries.shape[-1] ** -0.5
    added = causal_mask(scores.shape[-2], scores.shape[-1], scores.device) if isinstance(mask, str) else mask
    return scores if added is None else scores + added


def attention_probabilities(scores: Pattern) -> Pattern:
    """The softmax over keys, float32; a row with nothing left to see is zeros."""
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


class Attention(Tapped):
    """Grouped-query attention with a cache; this rank holds `n_local_heads` of the `n_heads`, and their cache.

    UnsupportedModel where the ranks do not divide the heads.
    """

    cache_k: Tensor  # [max_batch_size, max_seq_len, n_local_kv_heads, head_dim]
    cache_v: Tensor

    def __init__(self, args: ModelArgs, layer_id: int = 0) -> None:
        super().__init__(layer_id)
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads or args.n_heads, args.d_head
        self.n_local_heads = len(range(self.n_heads)[share(self.n_heads, "query heads")])
        self.n_local_kv_heads = len(range(self.n_kv_heads)[share(self.n_kv_heads, "key/value heads")])
        self.n_rep = self.n_heads // self.n_kv_heads
        width, kv_width, bias = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim, args.attention_bias
        self.wq = ColumnParallelLinear(args.dim, width, bias)
        self.wk = ColumnParallelLinear(args.dim, kv_width, bias)
        self.wv = ColumnParallelLinear(args.dim, kv_width, bias)
        self.wo = RowParallelLinear(width, args.dim, bias)
        self.cache_shape = (args.max_batch_size, args.max_seq_len, self.n_local_kv_heads, self.head_dim)
        self.allocate_cache()

    def allocate_cache(self) -> None:
        """An empty cache, on the weights' device and in their dtype."""
        self.register_buffer("cache_k", self.wk.weight.detach().new_zeros(self.cache_shape), persistent=False)
        self.register_buffer("cache_v", self.wv.weight.detach().new_zeros(self.cache_shape), persistent=False)
        self.graph: dict[str, HeadOutputs] = {}  # with gradients, what the cache holds, as the graph has it

    def listen(self, tap: Tap | None) -> None:
        super().listen(tap)
        self.graph = {}

    def head_results(self, premix: HeadOutputs) -> Float[Tensor, "batch token head d_model"]:
        """Each head's part of what `wo` makes of [batch, token, head, d_head]."""
        weight = self.wo.weight.view(-1, self.n_local_heads, self.head_dim)
        return gather(torch.einsum("bthd,mhd->bthm", cut(premix, 2, self.ranks), weight), 2, self.ranks)

    def forward(self, x: Stream, start_pos: int, freqs_cis: Frequencies, mask: Mask) -> Stream:
        """What attention adds to the stream. Rows go to the cache's columns `start_pos` on.

        RequestTooLong, InvalidRequest: more columns, or requests, than the cache has.
        """
        self._check_room(len(x), start_pos + x.shape[1])
        queries = self.wq(x).unflatten(-1, (self.n_local_heads, self.head_dim))  # [batch, token, head, d_head]
        keys = self.wk(x).unflatten(-1, (self.n_local_kv_heads, self.head_dim))
        values = self.wv(x).unflatten(-1, (self.n_local_kv_heads, self.head_dim))

        take = self._announced if self.listens("attention_queries") else self._taken_in
        queries, keys, values = take(queries, keys, values, start_pos, freqs_cis)  # keys: [batch, key, kv_head, d_head]

        outputs = self._attend(queries, keys, values, mask)
        outputs = self.point("attention_head_outputs", outputs, sharded=2)
        premix = self.point("attention_premix", outputs, sharded=2)
        return self.wo(premix.flatten(2))

    def _check_room(self, requests: int, columns: int) -> None:
        if columns > self.cache_shape[1]:
            raise RequestTooLong(f"{columns} tokens do not fit the cache: max_seq_len is {self.cache_shape[1]}.")
        if requests > self.cache_shape[0]:
            raise InvalidRequest(f"{requests} requests do not fit the cache: max_batch_size is {self.cache_shape[0]}.")

    def _taken_in(
        self, queries: HeadOutputs, keys: HeadOutputs, values: HeadOutputs, start_pos: int, freqs_cis: Frequencies
    ) -> tuple[HeadOutputs, HeadOutputs, HeadOutputs]:
        """Queries after the rotary embedding, and all keys and values so far, which the cache then holds."""
        queries, keys = apply_rotary_emb(queries, keys, freqs_cis)
        return queries, self._remember("cache_k", keys, start_pos), self._remember("cache_v", values, start_pos)

    def _remember(self, name: str, rows: HeadOutputs, start_pos: int) -> HeadOutputs:
        """Puts this step's rows into the cache, and gives all rows so far."""
        cache, batch, end = self.get_buffer(name), len(rows), start_pos + rows.shape[1]
        cache[:batch, start_pos:end] = rows.detach()
        if not rows.requires_grad:
            return cache[:batch, :end]
        # The cache is written in place, which a graph would not survive: the graph gets the rows themselves.
        past = self.graph[name] if name in self.graph and start_pos else cache[:batch, :start_pos]
        self.graph[name] = torch.cat([past, rows], 1)
        return self.graph[name]

    def _announced(
        self, queries: HeadOutputs, keys: HeadOutputs, values: HeadOutputs, start_pos: int, freqs_cis: Frequencies
    ) -> tuple[HeadOutputs, HeadOutputs, HeadOutputs]:
        """The same, or what it was edited to; the cache keeps what was edited."""
        assert self.tap is not None
        before = {"attention_queries_prerotary": shown(queries), "attention_keys_prerotary": shown(keys)}
        if torch.is_grad_enabled():  # what is announced is what the graph goes on from
            queries, keys = (hidden(x) for x in before.values())
        queries, keys, values = self._taken_in(queries, keys, values, start_pos, freqs_cis)
        after = {"attention_queries": shown(queries), "attention_cached_keys": shown(keys)}
        own = {**before, **after, "attention_cached_values": values.transpose(1, 2)}
        given = {name: gather(value, 1, self.ranks) for name, value in own.items()}
        taken = self.tap.operands(given, self.layer_id)
        edited = {name: cut(taken[name], 1, self.ranks) for name in own if taken[name] is not given[name]}
        if "attention_queries" in edited:
            queries = hidden(edited["attention_queries"])
        if "attention_cached_keys" in edited:
            keys = self._rewrite("cache_k", hidden(edited["attention_cached_keys"]))
        if "attention_cached_values" in edited:
            values = self._rewrite("cache_v", edited["attention_cached_values"].transpose(1, 2))
        return queries, keys, values

    def _rewrite(self, name: str, whole: HeadOutputs) -> HeadOutputs:
        self.get_buffer(name)[: len(whole), : whole.shape[1]] = whole.detach()
        if whole.requires_grad:
            self.graph[name] = whole
        return whole

    def _attend(self, queries: HeadOutputs, keys: HeadOutputs, values: HeadOutputs, mask: Mask) -> HeadOutputs:
        """The head outputs: out of the fused operation, and again in the open for rows whose pattern was edited.

        So reading changes no bit. With gradients all are computed in the open, so that they reach the pattern.
        """
        if torch.is_grad_enabled():
            return self._attend_in_the_open(queries, keys, values, mask)[0]
        q, k, v = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        causal, added = (True, None) if isinstance(mask, str) else (False, mask)
        fused = F.scaled_dot_product_attention(q, k, v, added, is_causal=causal, enable_gqa=True).transpose(1, 2)
        if not (self.listens("attention_scores") or self.listens("attention_probabilities")):
            return fused
        outputs, edited = self._attend_in_the_open(queries, keys, values, mask)
        return torch.where(edited.unsqueeze(-1), outputs, fused)

    def _attend_in_the_open(
        self, queries: HeadOutputs, keys: HeadOutputs, values: HeadOutputs, mask: Mask
    ) -> tuple[HeadOutputs, Tensor]:
        """The head outputs, and which rows [batch, token, head] were edited. What is masked stays masked."""
        keys, values = repeat_kv(keys, self.n_rep), repeat_kv(values, self.n_rep)
        computed = attention_scores(queries.transpose(1, 2), keys.transpose(1, 2), mask)
        masked = torch.isneginf(computed)
        scores = self.point("attention_scores", computed, sharded=1).masked_fill(masked, -math.inf)
        softmax = attention_probabilities(scores)
        pattern = self.point("attention_probabilities", softmax, sharded=1).masked_fill(masked, 0.0)
        outputs = pattern.type_as(values) @ values.transpose(1, 2)
        edited = (scores != computed).any(-1) | (pattern != softmax).any(-1)
        return outputs.transpose(1, 2), edited.transpose(1, 2)
