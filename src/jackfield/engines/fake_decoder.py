"""The scripted engine's decoder: two layers, two query heads on one key/value head, small enough to check by hand.

Every value of the contract is handed to a tap on the way. Weights come out of a seed; there is nothing to load.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from jackfield.axes import HeadOutputs, Stream, TokenIds
from jackfield.engines.inline import InlineTap

LAYERS, HEADS, WIDTH, D_MODEL, D_MLP, VOCAB, CONTEXT = 2, 2, 4, 8, 12, 32, 64


class Layer(NamedTuple):
    """The weights of one layer: `x += attention(norm(x))`, `x += mlp(norm(x))`. Each is [out, in]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    up: Tensor
    down: Tensor


class Decoder:
    """The weights."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

        self.embedding, self.head = weight(VOCAB, D_MODEL, 3.0), weight(VOCAB, D_MODEL, 3.0)
        self.layers = [
            Layer(
                q=weight(HEADS * WIDTH, D_MODEL, 2.0),
                k=weight(WIDTH, D_MODEL, 2.0),
                v=weight(WIDTH, D_MODEL),
                o=weight(D_MODEL, HEADS * WIDTH),
                up=weight(D_MLP, D_MODEL),
                down=weight(D_MODEL, D_MLP),
            )
            for _ in range(LAYERS)
        ]

    def project(self, x: Tensor, norm: bool) -> Tensor:
        """[..., D_MODEL] on the vocabulary, with or without the final norm."""
        return (normed(x) if norm else x) @ self.head.T

    def head_results(self, layer: int, premix: HeadOutputs) -> Float[Tensor, "batch token head d_model"]:
        """Each head's part of the output projection's result."""
        return torch.einsum("bthd,mhd->bthm", premix, self.layers[layer].o.unflatten(-1, (HEADS, WIDTH)))


class ForwardPass:
    """The forward passes of one batch, and the keys and values that they leave behind."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache: dict[tuple[int, str], Tensor] = {}  # [batch, 1, column, WIDTH]

    def __call__(
        self, tokens: TokenIds, columns: int, pads: Sequence[int], tap: InlineTap
    ) -> Float[Tensor, "batch vocab"]:
        """The last row's logits."""
        column, pad = torch.arange(columns + tokens.shape[1]), torch.tensor(pads)[:, None, None, None]
        self._hidden = (column > column[columns:, None]) | (column < pad)  # [batch, 1, token, column]
        self._positions = (column[columns:] - pad[..., 0]).to(torch.float32)  # [batch, 1, token]
        x = tap("token_embeddings", None, self._decoder.embedding[tokens])
        for number, layer in enumerate(self._decoder.layers):
            x = self._layer(number, layer, x, tap)
        scaled = tap("final_norm_output", None, normed(x))
        return tap("logits", None, scaled[:, -1:] @ self._decoder.head.T)[:, 0]

    def _layer(self, number: int, layer: Layer, x: Stream, tap: InlineTap) -> Stream:
        x = tap("layer_input", number, x)
        scaled = tap("attention_norm_output", number, normed(x))
        x = x + tap("attention_output", number, self._attention(number, layer, scaled, tap))
        x = tap("layer_mid", number, x)
        scaled = tap("mlp_norm_output", number, normed(x))
        neurons = tap("mlp_activations", number, torch.relu(scaled @ layer.up.T))
        x = x + tap("mlp_output", number, neurons @ layer.down.T)
        return tap("layer_output", number, x)

    def _attention(self, number: int, layer: Layer, x: Stream, tap: InlineTap) -> Stream:
        queries, keys, values = self._operands(number, layer, x, tap)
        scores = (queries @ keys.transpose(-1, -2) * WIDTH**-0.5).masked_fill(self._hidden, -torch.inf)
        scores = tap("attention_scores", number, scores).masked_fill(self._hidden, -torch.inf)
        pattern = torch.softmax(scores, -1).nan_to_num(0.0)  # a row that sees nothing is NaN out of the softmax
        pattern = tap("attention_probabilities", number, pattern).masked_fill(self._hidden, 0.0)
        heads: HeadOutputs = tap("attention_head_outputs", number, (pattern @ values).transpose(1, 2))
        return tap("attention_premix", number, heads).flatten(-2) @ layer.o.T

    def _operands(self, number: int, layer: Layer, x: Stream, tap: InlineTap) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, head, token, WIDTH]; keys and values [batch, 1, column, WIDTH], which the cache keeps."""
        q, k, v = heads_of(x @ layer.q.T), heads_of(x @ layer.k.T), heads_of(x @ layer.v.T)
        operands = tap.operands(
            {
                "attention_queries_prerotary": q,
                "attention_keys_prerotary": k,
                "attention_queries": turned(q, self._positions),
                "attention_cached_keys": self._remembered(number, "keys", turned(k, self._positions)),
                "attention_cached_values": self._remembered(number, "values", v),
            },
            number,
        )
        keys = self._cache[number, "keys"] = operands["attention_cached_keys"]
        values = self._cache[number, "values"] = operands["attention_cached_values"]
        return operands["attention_queries"], keys, values

    def _remembered(self, number: int, which: str, rows: Tensor) -> Tensor:
        past = self._cache.get((number, which))
        return rows if past is None else torch.cat([past, rows], 2)


def normed(x: Tensor) -> Tensor:
    """Each row over its root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def heads_of(x: Tensor) -> Tensor:
    """[batch, token, heads * WIDTH] to [batch, heads, token, WIDTH]."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, width // WIDTH, WIDTH).transpose(1, 2)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """A rotary embedding of one angle, 0.3 per position: the halves of the width turn into each other."""
    angle = 0.3 * positions[..., None]
    one, other = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-other, one], -1) * angle.sin()
