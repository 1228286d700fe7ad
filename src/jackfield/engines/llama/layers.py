"""What a Llama computes, every value of the contract a variable on the way.

A value is announced at its `point`: a `Tap` that listens there gets the tensor in the contract's shape, and what it
returns is what the model goes on with. Where nobody listens that is one comparison. What attention is given, queries,
keys and values, before and after the rotary embedding, is announced together.

Channels of queries and keys are in Meta's order, pairs (0, 1), (2, 3), ... turning together, because that is what
complex numbers are. They are announced in transformers' order, pairs (0, d/2), (1, d/2 + 1), ..., as on every engine.
"""

import math
from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Complex64, Float, Int
from torch import Tensor, nn

from jackfield.axes import HeadOutputs, Pattern, Queries, Stream, TokenIds
from jackfield.engines.llama.args import ModelArgs, RopeScaling
from jackfield.engines.llama.parallel import ColumnParallelLinear, RowParallelLinear, cut, gather, num_ranks, share
from jackfield.errors import InvalidRequest, RequestTooLong

Frequencies: TypeAlias = Complex64[Tensor, "*batch token pair"]
Mask: TypeAlias = Float[Tensor, "*batch token key"] | Literal["causal"] | None
"""What is added to the scores; "causal": as many keys as queries, each sees up to itself; None: all see all."""


class Tap(Protocol):
    """Who listens. On several ranks all must answer alike, since what is shared out is gathered first."""

    def listens(self, name: str, layer: int | None) -> bool:
        """Whether this value is wanted now; asked each time it comes. `layer` is None on the root."""
        ...

    def __call__(self, name: str, layer: int | None, value: Tensor) -> Tensor:
        """`value` itself where nothing is edited, else another tensor of its shape and dtype.

        `value` is the model's own, perhaps a view of its cache: copy it before you edit or keep it.
        """
        ...

    def operands(self, tensors: Mapping[str, Tensor], layer: int | None) -> Mapping[str, Tensor]:
        """The same for what attention is given, all at once: {name: [batch, head, token or key, d_head]}."""
        ...


class Tapped(nn.Module):
    """A module that announces values."""

    def __init__(self, layer_id: int | None) -> None:
        super().__init__()
        self.layer_id, self.ranks = layer_id, num_ranks()
        self.tap: Tap | None = None

    def listen(self, tap: Tap | None) -> None:
        """Announces values to `tap` from now on; None ends that."""
        self.tap = tap

    def listens(self, name: str) -> bool:
        """Whether anybody wants this value of this layer."""
        return self.tap is not None and self.tap.listens(name, self.layer_id)

    def point(self, name: str, value: Tensor, sharded: int | None = None) -> Tensor:
        """`value`, or what it was edited to; `sharded` is the axis of which this rank holds a part."""
        if self.tap is None or not self.listens(name):
            return value
        whole = value if sharded is None else gather(value, sharded, self.ranks)
        edited = self.tap(name, self.layer_id, whole)
        if edited is whole:
            return value
        return edited if sharded is None else cut(edited, sharded, self.ranks)


def wide(x: Tensor) -> Tensor:
    """`x` in float32, in which norms, turns and softmax are computed, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Divides each row by its root mean square, in float32, and casts back before the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Stream) -> Stream:
        return F.rms_norm(wide(x), x.shape[-1:], eps=self.eps).type_as(x) * self.weight


def precompute_freqs_cis(
    dim: int, end: int, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> Complex64[Tensor, "position pair"]:
    """exp(i * position * frequency), [end, dim // 2], on the CPU: how far each position turns each pair of channels."""
    # In float32, as transformers does it: at far positions another precision is another angle.
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = torch.outer(torch.arange(end, dtype=torch.float32, device="cpu"), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    # Llama 3 (llama-models, models/llama3/model.py): a pair that turns often within the original context keeps its
    # frequency, one that turns seldom gets the slow one, and those between are mixed.
    slow = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return slow
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * slow


def apply_rotary_emb(
    queries: HeadOutputs, keys: HeadOutputs, freqs_cis: Frequencies
) -> tuple[HeadOutputs, HeadOutputs]:
    """Turns each pair of channels of [batch, token, head, d_head] by its position's angle, in float32."""
    turn = freqs_cis.unsqueeze(-2)  # the same for every head
    return _turned(queries, turn), _turned(keys, turn)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(wide(x).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def interleaved(x: Tensor) -> Tensor:
    """The last axis from transformers' order of channels to Meta's."""
    return x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def half_split(x: Tensor) -> Tensor:
    """The last axis from Meta's order of channels to transformers'."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def shown(x: HeadOutputs) -> Queries:
    """Queries or keys [batch, token, head, d_head] as they are announced: [batch, head, token, d_head]."""
    return half_split(x).transpose(1, 2)


def hidden(x: Queries) -> HeadOutputs:
    """The other way round."""
    return interleaved(x.transpose(1, 2))


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


class FeedForward(Tapped):
    """The gated feed-forward block; its neurons are shared out."""

    def __init__(self, args: ModelArgs, layer_id: int = 0) -> None:
        super().__init__(layer_id)
        self.w1 = ColumnParallelLinear(args.dim, args.d_mlp, args.mlp_bias)  # gate
        self.w2 = RowParallelLinear(args.d_mlp, args.dim, args.mlp_bias)  # down
        self.w3 = ColumnParallelLinear(args.dim, args.d_mlp, args.mlp_bias)  # up

    def forward(self, x: Stream) -> Stream:
        return self.w2(self.point("mlp_activations", F.silu(self.w1(x)) * self.w3(x), sharded=2))


class TransformerBlock(Tapped):
    """One layer: attention, then feed-forward, each after a norm, each added to the stream."""

    def __init__(self, layer_id: int, args: ModelArgs) -> None:
        super().__init__(layer_id)
        self.attention = Attention(args, layer_id)
        self.feed_forward = FeedForward(args, layer_id)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Stream, start_pos: int, freqs_cis: Frequencies, mask: Mask) -> Stream:
        x = self.point("layer_input", x)
        normed = self.point("attention_norm_output", self.attention_norm(x))
        x = x + self.point("attention_output", self.attention(normed, start_pos, freqs_cis, mask))
        x = self.point("layer_mid", x)
        normed = self.point("mlp_norm_output", self.ffn_norm(x))
        x = x + self.point("mlp_output", self.feed_forward(normed))
        return self.point("layer_output", x)


class Transformer(Tapped):
    """The decoder, from tokens to logits. Every rank has the whole embedding, and some words of the output head."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(None)
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(layer_id, args) for layer_id in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = ColumnParallelLinear(args.dim, args.vocab_size, gather_output=True)
        # Not a buffer: `module.to(torch.bfloat16)` would drop the imaginary parts.
        self.freqs_cis = precompute_freqs_cis(args.d_head, args.max_seq_len, args.rope_theta, args.rope_scaling)
        self.tie()

    def tie(self) -> None:
        """In a tied model, makes the output head the embedding, or this rank's rows of it, without a copy."""
        if self.args.tied:
            table = self.tok_embeddings.get_parameter("weight")
            rows = table.detach()[share(len(table), "words")]
            self.output.weight = table if len(rows) == len(table) else nn.Parameter(rows, requires_grad=False)

    def allocate_cache(self) -> None:
        """An empty cache in every layer, on the weights' device and in their dtype."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.allocate_cache()

    def listen(self, tap: Tap | None) -> None:
        super().listen(tap)
        for module in self.modules():
            if isinstance(module, Tapped) and module is not self:
                module.listen(tap)

    def head_results(self, layer: int, premix: HeadOutputs) -> Float[Tensor, "batch token head d_model"]:
        """Each head's part of the attention's output in one layer."""
        block = self.layers[layer]
        assert isinstance(block, TransformerBlock)
        return block.attention.head_results(premix)

    def project(self, x: Tensor, norm: bool = True) -> Tensor:
        """[..., dim] on the vocabulary, with or without the final norm."""
        return self.output(self.norm(x) if norm else x)

    def forward(
        self,
        tokens: TokenIds,
        start_pos: int = 0,
        padding: Int[Tensor, " batch"] | None = None,
        last_row: bool = False,
    ) -> Float[Tensor, "batch token vocab"]:
        """The logits of each row, or of the last alone; the rows go to the cache's columns `start_pos` on.

        `padding`: how many of a request's first columns are padding. Its position 0 comes after them; what is
        computed in them means nothing, and none of its tokens sees it.
        """
        embedded = self.tok_embeddings(tokens)
        if torch.is_grad_enabled():
            embedded.requires_grad_()  # the weights are frozen, so a graph begins here
        stream = self.point("token_embeddings", embedded)
        freqs_cis, mask = self._positions(stream, start_pos, padding)
        for layer in self.layers:
            stream = layer(stream, start_pos, freqs_cis, mask)
        normed = self.point("final_norm_output", self.norm(stream))
        return self.point("logits", self.output(normed[:, -1:] if last_row else normed))

    def _positions(self, stream: Stream, start_pos: int, padding: Tensor | None) -> tuple[Frequencies, Mask]:
        """How far each row is turned, and what it may not see."""
        self.freqs_cis = self.freqs_cis.to(stream.device)
        num_rows, end = stream.shape[1], start_pos + stream.shape[1]
        if padding is None and (num_rows == 1 or start_pos == 0):
            return self.freqs_cis[start_pos:end], None if num_rows == 1 else "causal"
        mask = causal_mask(num_rows, end, stream.device).type_as(stream)
        if padding is None:
            return self.freqs_cis[start_pos:end], mask
        columns = torch.arange(end, device=stream.device)
        rows = columns[start_pos:]
        # A row of padding sees itself, since a softmax over nothing is NaN.
        unseen = (columns < padding[:, None, None]) & (columns != rows[:, None])  # [batch, row, column]
        return self.freqs_cis[(rows - padding[:, None]).clamp(min=0)], mask.masked_fill(unseen, -math.inf).unsqueeze(1)
