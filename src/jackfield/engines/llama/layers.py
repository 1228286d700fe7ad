"""What a Llama computes around its attention: the layer's two sublayers and norms, from tokens to logits."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from jackfield.axes import HeadOutputs, Stream, TokenIds
from jackfield.engines.llama.args import ModelArgs
from jackfield.engines.llama.attention import Attention, Mask, causal_mask
from jackfield.engines.llama.parallel import ColumnParallelLinear, RowParallelLinear, share
from jackfield.engines.llama.rotary import Frequencies, precompute_freqs_cis
from jackfield.engines.llama.tapped import Tap, Tapped, wide


class RMSNorm(nn.Module):
    """Divides each row by its root mean square, in float32, and casts back before the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Stream) -> Stream:
        return F.rms_norm(wide(x), x.shape[-1:], eps=self.eps).type_as(x) * self.weight


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
