"""What a Llama computes, from tokens to logits. docs/llama.md walks through its attention.

The rotary embedding takes pairs of channels as complex numbers, so channels are in Meta's order: (0, 1), (2, 3), ...
turn together. They are announced in transformers' order, (0, d/2), (1, d/2 + 1), ..., as on every engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from jaxtyping import Complex64, Float, Int
from torch import Tensor, nn

from jackfield.axes import HeadOutputs, Pattern, Queries, Stream, TokenIds
from jackfield.engines.inline import Tap
from jackfield.engines.llama.parallel import ColumnParallelLinear, RowParallelLinear, Tapped, cut, gather, share
from jackfield.errors import InvalidRequest, RequestTooLong, UnsupportedModel

Frequencies: TypeAlias = Complex64[Tensor, "*batch token pair"]
Mask: TypeAlias = Float[Tensor, "*batch token key"] | Literal["causal"] | None
"""What is added to the scores; "causal": as many keys as queries, each sees up to itself; None: all see all."""


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The sizes of a model and of its cache, by Meta's names. UnsupportedModel for heads that cannot be."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    vocab_size: int = 32000
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_batch_size: int = 8
    max_seq_len: int = 2048
    head_dim: int | None = None
    ffn_dim: int | None = None  # neurons, in place of the rule of multiple_of and ffn_dim_multiplier
    rope_type: str = "default"  # else how the rotary frequencies are slowed down: "linear", or as in "llama3"
    rope_scaling_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False  # the output head is the embedding

    def __post_init__(self) -> None:
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise UnsupportedModel(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}.")
        if self.d_head % 2:
            raise UnsupportedModel(f"head_dim={self.d_head} is odd: the rotary embedding turns pairs of channels.")

    @property
    def d_head(self) -> int:
        """`head_dim`, or an equal part of `dim`."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def d_mlp(self) -> int:
        """`ffn_dim`, or two thirds of four times `dim`, times the multiplier, rounded up to a multiple."""
        neurons = int(int(2 * 4 * self.dim / 3) * (self.ffn_dim_multiplier or 1))
        return self.ffn_dim or -(-neurons // self.multiple_of) * self.multiple_of


def wide(x: Tensor) -> Tensor:
    """`x` in float32, in which norms, turns and softmax are computed, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.RMSNorm):
    """Divides each row by its root mean square, in float32, and casts back before the weight."""

    def forward(self, x: Stream) -> Stream:
        return F.rms_norm(wide(x), x.shape[-1:], eps=self.eps).type_as(x) * self.weight


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0, scaling: ModelArgs | None = None) -> Frequencies:
    """exp(i * position * frequency), [end, dim // 2], on the CPU: how far each position turns each pair of channels."""
    # In float32, as transformers does it: at far positions another precision is another angle.
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if scaling is not None and scaling.rope_type != "default":
        frequencies = _scaled(frequencies, scaling)
    angles = torch.outer(torch.arange(end, dtype=torch.float32, device="cpu"), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled(frequencies: Tensor, args: ModelArgs) -> Tensor:
    # Llama 3 (llama-models, models/llama3/model.py): a pair that turns often within the original context keeps its
    # frequency, one that turns seldom gets the slow one, and those between are mixed.
    slow = frequencies / args.rope_scaling_factor
    if args.rope_type == "linear":
        return slow
    turns = args.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - args.low_freq_factor) / (args.high_freq_factor - args.low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * slow


def apply_rotary_emb(xq: HeadOutputs, xk: HeadOutputs, freqs_cis: Frequencies) -> tuple[HeadOutputs, HeadOutputs]:
    """Turns each pair of channels of [batch, token, head, d_head] by its position's angle, in float32."""
    turn = freqs_cis.unsqueeze(-2)  # the same for every head
    return _turned(xq, turn), _turned(xk, turn)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(wide(x).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def interleaved(x: Tensor) -> Tensor:
    """The last axis from transformers' order of channels to Meta's."""
    return x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def half_split(x: Tensor) -> Tensor:
    """The last axis from Meta's order of channels to transformers'."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def repeat_kv(x: HeadOutputs, n_rep: int) -> HeadOutputs:
    """[batch, token, kv_head, d] to [batch, token, kv_head * n_rep, d]: query head h uses kv head h // n_rep."""
    return x.repeat_interleave(n_rep, dim=2)


def attention_scores(queries: Queries, keys: Queries, mask: Mask) -> Pattern:
    """What enters the softmax, float32: scaled products plus the mask. One key head for each query head."""
    scores = wide(queries) @ wide(keys).transpose(-2, -1) * queries.shape[-1] ** -0.5
    if isinstance(mask, str):
        mask = scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    return scores if mask is None else scores + mask


def attention_probabilities(scores: Pattern) -> Pattern:
    """The softmax over keys, float32; a row with nothing left to see is zeros."""
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


class Attention(Tapped):
    """Grouped-query attention with a cache; this rank holds `n_local_heads` of the `n_heads`, and their cache."""

    def __init__(self, args: ModelArgs, layer_id: int = 0) -> None:
        super().__init__(layer_id)
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads or args.n_heads, args.d_head
        self.n_local_heads = share(self.n_heads, "query heads")
        self.n_local_kv_heads = share(self.n_kv_heads, "key/value heads")
        self.n_rep = self.n_heads // self.n_kv_heads
        width, kv_width, bias = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim, args.attention_bias
        self.wq = ColumnParallelLinear(args.dim, width, bias)
        self.wk = ColumnParallelLinear(args.dim, kv_width, bias)
        self.wv = ColumnParallelLinear(args.dim, kv_width, bias)
        self.wo = RowParallelLinear(width, args.dim, bias)
        shape = (args.max_batch_size, args.max_seq_len, self.n_local_kv_heads, self.head_dim)
        self.cache_k: Tensor = nn.Buffer(torch.zeros(shape), persistent=False)
        self.cache_v: Tensor = nn.Buffer(torch.zeros(shape), persistent=False)
        self.graph: dict[str, tuple[Tensor, int, HeadOutputs]] = {}  # a cache, at a version of it, as a graph has it

    def forward(self, x: Stream, start_pos: int, freqs_cis: Frequencies, mask: Mask) -> Stream:
        """What attention adds to the stream. RequestTooLong, InvalidRequest: the cache has no room for it."""
        queries = self.wq(x).unflatten(-1, (self.n_local_heads, self.head_dim))  # [batch, token, head, d_head]
        keys = self.wk(x).unflatten(-1, (self.n_local_kv_heads, self.head_dim))
        values = self.wv(x).unflatten(-1, (self.n_local_kv_heads, self.head_dim))
        values = self._remember("cache_v", values, start_pos)  # all so far: [batch, key, kv_head, d_head]
        given: dict[str, Tensor] = {}
        if listening := self.listens("attention_queries"):
            given["attention_queries_prerotary"] = half_split(queries).transpose(1, 2)
            given["attention_keys_prerotary"] = half_split(keys).transpose(1, 2)
            if torch.is_grad_enabled():  # what is announced is what the graph goes on from
                queries, keys = (interleaved(x.transpose(1, 2)) for x in given.values())
        queries, keys = apply_rotary_emb(queries, keys, freqs_cis)
        keys = self._remember("cache_k", keys, start_pos)
        if listening:
            given["attention_queries"] = half_split(queries).transpose(1, 2)
            given["attention_cached_keys"] = half_split(keys).transpose(1, 2)
            given["attention_cached_values"] = values.transpose(1, 2)
            taken = self.points(given, sharded=1)
            if taken["attention_queries"] is not given["attention_queries"]:
                queries = interleaved(taken["attention_queries"].transpose(1, 2))
            if taken["attention_cached_keys"] is not given["attention_cached_keys"]:  # the cache keeps what was edited
                keys = self._remember("cache_k", interleaved(taken["attention_cached_keys"].transpose(1, 2)), 0)
            if taken["attention_cached_values"] is not given["attention_cached_values"]:
                values = self._remember("cache_v", taken["attention_cached_values"].transpose(1, 2), 0)
        outputs = self.point("attention_head_outputs", self._attend(queries, keys, values, mask), sharded=2)
        return self.wo(self.point("attention_premix", outputs, sharded=2).flatten(2))

    def _remember(self, name: str, rows: HeadOutputs, start_pos: int) -> HeadOutputs:
        """Puts rows into the cache, and gives all rows so far."""
        cache: Tensor = getattr(self, name)
        batch, end = rows.shape[0], start_pos + rows.shape[1]
        if end > cache.shape[1]:
            raise RequestTooLong(f"{end} tokens do not fit the cache: max_seq_len is {cache.shape[1]}.")
        if batch > cache.shape[0]:
            raise InvalidRequest(f"{batch} requests do not fit the cache: max_batch_size is {cache.shape[0]}.")
        written, version, past = self.graph.pop(name, (cache, cache._version, cache))
        if written is not cache or version != cache._version or len(past) < batch:
            past = cache  # which somebody has put there, or written, since
        cache[:batch, start_pos:end] = rows.detach()
        if not rows.requires_grad:
            return cache[:batch, :end]
        # The cache is written in place, which a graph would not survive: the graph gets the rows themselves.
        # A prompt from the start is a graph of its own: of one before it, not even an empty part may be in it.
        rows = torch.cat([past[:batch, :start_pos], rows], 1) if start_pos else rows.clone()
        self.graph[name] = cache, cache._version, rows
        return rows

    def _attend(self, queries: HeadOutputs, keys: HeadOutputs, values: HeadOutputs, mask: Mask) -> HeadOutputs:
        """The head outputs: out of the fused operation, and again in the open for rows whose pattern was edited.

        So reading changes no bit. With gradients all are computed in the open, so that they reach the pattern.
        """
        fused = None
        q, k, v = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if not torch.is_grad_enabled():
            causal, added = (True, None) if isinstance(mask, str) else (False, mask)
            fused = F.scaled_dot_product_attention(q, k, v, added, is_causal=causal, enable_gqa=True)
            if not (self.listens("attention_scores") or self.listens("attention_probabilities")):
                return fused.transpose(1, 2)
        computed = attention_scores(q, repeat_kv(keys, self.n_rep).transpose(1, 2), mask)
        masked = torch.isneginf(computed)  # what is masked stays masked
        scores = self.point("attention_scores", computed, sharded=1).masked_fill(masked, -math.inf)
        softmax = attention_probabilities(scores)
        pattern = self.point("attention_probabilities", softmax, sharded=1).masked_fill(masked, 0.0)
        outputs = pattern.type_as(values) @ repeat_kv(values, self.n_rep).transpose(1, 2)
        if fused is None:
            return outputs.transpose(1, 2)
        edited = (scores != computed).any(-1) | (pattern != softmax).any(-1)  # [batch, head, token]
        return torch.where(edited.unsqueeze(-1), outputs, fused).transpose(1, 2)


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
        layers = nn.ModuleList(TransformerBlock(layer_id, args) for layer_id in range(args.n_layers))
        self.layers = cast("Sequence[TransformerBlock]", layers)
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = ColumnParallelLinear(args.dim, args.vocab_size)
        # Not a buffer: `module.to(torch.bfloat16)` would drop the imaginary parts.
        self.freqs_cis = precompute_freqs_cis(args.d_head, args.max_seq_len, args.rope_theta, args)
        if args.tied and self.ranks == 1:
            self.output.weight = self.tok_embeddings.weight

    def listen(self, tap: Tap | None) -> None:
        """Announces values to `tap` from now on; None ends that."""
        for module in self.modules():
            if isinstance(module, Tapped):
                module.tap = tap
            if isinstance(module, Attention):
                module.graph = {}

    def head_results(self, layer: int, premix: HeadOutputs) -> Float[Tensor, "batch token head d_model"]:
        """Each head's part of the attention's output in one layer, from its premix [batch, token, head, d_head]."""
        attention = self.layers[layer].attention
        weight = attention.wo.weight.view(-1, attention.n_local_heads, attention.head_dim)
        return gather(torch.einsum("bthd,mhd->bthm", cut(premix, 2, self.ranks), weight), 2, self.ranks)

    def project(self, x: Tensor, norm: bool = True) -> Tensor:
        """[..., dim] on the vocabulary, with or without the final norm."""
        return gather(self.output(self.norm(x) if norm else x), -1, self.ranks)

    def forward(
        self, tokens: TokenIds, start_pos: int = 0, padding: Int[Tensor, " batch"] | None = None, last_row: bool = False
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
        return self.point("logits", self.project(normed[:, -1:] if last_row else normed, norm=False))

    def _positions(self, stream: Stream, start_pos: int, padding: Tensor | None) -> tuple[Frequencies, Mask]:
        """How far each row is turned, and what it may not see."""
        self.freqs_cis = self.freqs_cis.to(stream.device)
        num_rows, end = stream.shape[1], start_pos + stream.shape[1]
        if padding is None and (num_rows == 1 or start_pos == 0):
            return self.freqs_cis[start_pos:end], None if num_rows == 1 else "causal"
        columns = torch.arange(end, device=stream.device)
        rows = columns[start_pos:, None]
        first = 0 if padding is None else padding[:, None, None]  # [batch, row, column]
        # A row of padding sees itself, since a softmax over nothing is NaN.
        unseen = (columns > rows) | (columns < rows.clamp(max=first))
        mask = stream.new_zeros(unseen.shape).masked_fill(unseen, -math.inf)
        return self.freqs_cis[(rows - first).squeeze(-1).clamp(0, self.args.max_seq_len - 1)], mask.unsqueeze(-3)
