"""Models that no line of the library names, with odd children: for tests of what is found by structure."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WIDTH, HEADS, KV_HEADS, SIZE = 48, 4, 2, 12


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, vocab_size: int = 96, depth: int = 3, **kwargs: Any) -> None:
        self.depth = depth
        super().__init__(vocab_size=vocab_size, **kwargs)


def eager_attention_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any):
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * kwargs["scaling"]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    pattern = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (pattern @ value).transpose(1, 2), pattern


class Dispatching(nn.Module):
    """Attention through the interface, values before keys before queries in one projection."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.config = config
        self.vkq = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)
        self.back = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, stream: Tensor) -> tuple[Tensor, None]:
        value, key, query = (
            part.unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for part in self.vkq(stream).split([KV_HEADS * SIZE, KV_HEADS * SIZE, HEADS * SIZE], dim=-1)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        heads, _ = attend(self, query, key, value, None, scaling=0.31, sliding_window=5)
        return self.back(heads.reshape(*stream.shape[:2], -1)), None


class ByHand(nn.Module):
    """Attention by torch's own function, query, key and value of each head side by side."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.everything = nn.Linear(WIDTH, 3 * HEADS * SIZE)
        self.back = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.everything(stream).unflatten(-1, (HEADS, 3, SIZE)).permute(3, 0, 2, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.27)
        return self.back(heads.transpose(1, 2).flatten(2))


class Turn(nn.Module):
    """A rotary embedding that is a module: pairs of neighbours, turned by the token's position."""

    def forward(self, heads: Tensor) -> Tensor:
        angle = torch.arange(heads.shape[2])[:, None] * 0.7 ** torch.arange(SIZE // 2)
        even, odd = heads[..., ::2], heads[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
        return torch.stack(turned, dim=-1).flatten(-2)


class Turning(ByHand):
    """Attention by hand whose queries and keys go through modules that turn them."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.turn_queries, self.turn_keys, self.sharpness = Turn(), Turn(), 0.27

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.everything(stream).unflatten(-1, (HEADS, 3, SIZE)).permute(3, 0, 2, 1, 4)
        scores = self.turn_queries(query) @ self.turn_keys(key).transpose(2, 3) * self.sharpness
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.back((pattern @ value).transpose(1, 2).flatten(2))


class Repeating(nn.Module):
    """Attention by hand that repeats its keys and values for the query heads of a group."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.ask, self.tell, self.give = (nn.Linear(WIDTH, count * SIZE) for count in (HEADS, KV_HEADS, KV_HEADS))
        self.back = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = (
            made(stream).unflatten(-1, (-1, SIZE)).transpose(1, 2) for made in (self.ask, self.tell, self.give)
        )
        key, value = (heads.repeat_interleave(HEADS // KV_HEADS, dim=1) for heads in (key, value))
        hidden = torch.ones(stream.shape[1], stream.shape[1], dtype=torch.bool).triu(1)
        pattern = (query @ key.transpose(2, 3) * 0.27).masked_fill(hidden, float("-inf")).softmax(-1)
        return self.back((pattern @ value).transpose(1, 2).flatten(2))


class ByExponents(ByHand):
    """Attention by hand that writes its softmax as exponents of what the log of their sum was taken off."""

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.everything(stream).unflatten(-1, (HEADS, 3, SIZE)).permute(3, 0, 2, 1, 4)
        hidden = torch.ones(stream.shape[1], stream.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(2, 3) * 0.27).masked_fill(hidden, float("-inf"))
        pattern = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        return self.back((pattern @ value).transpose(1, 2).flatten(2))


class WithSink(ByHand):
    """Attention by hand with one more column in its softmax, which takes a part and gives nothing."""

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.everything(stream).unflatten(-1, (HEADS, 3, SIZE)).permute(3, 0, 2, 1, 4)
        hidden = torch.ones(stream.shape[1], stream.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(2, 3) * 0.27).masked_fill(hidden, float("-inf"))
        pattern = nn.functional.pad(scores, (0, 1)).softmax(-1)[..., :-1]
        return self.back((pattern @ value).transpose(1, 2).flatten(2))


class Smoothing(ByHand):
    """Mixes tokens without attention: each gets the mean of those so far."""

    def forward(self, stream: Tensor) -> Tensor:
        value = self.everything(stream)[..., : HEADS * SIZE]
        return self.back(value.cumsum(1) / torch.arange(1, stream.shape[1] + 1)[:, None])


class Neurons(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Sequential(nn.Module):
    """The MLP after the attention; what either adds is halved."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.n2, self.n1 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff, self.mixer, self.damping = Neurons(), mixer, 0.5

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        mixed = self.mixer(self.n1(x))
        x = x + self.damping * (mixed[0] if isinstance(mixed, tuple) else mixed)
        return x + self.damping * self.ff(self.n2(x))


class TwoStreams(nn.Module):
    """A reversible block: each half is added to by a function of the other."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff, self.mixer = Neurons(), mixer

    def forward(self, positions: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        left, right = x
        left = left + self.mixer(self.n1(right))
        return left, right + self.ff(self.n2(left))


class OddModel(PreTrainedModel):
    """Embeddings, a row of blocks, a norm and a head, none under a usual name."""

    config_class = OddConfig
    _supports_sdpa = True
    block: type[nn.Module] = Sequential
    mixer: type[nn.Module] = Dispatching

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, WIDTH)
        self.tower = nn.Sequential(*(self.block(self.mixer(config)) for _ in range(config.depth)))
        self.last, self.unwords = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.unwords

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are drawn by `draw`."""

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        x, positions = self.words(input_ids), torch.arange(input_ids.shape[1])[None]
        for block in self.tower:
            x = block(positions, x)
        return CausalLMOutputWithPast(logits=self.unwords(self.last(x)))


class OddByHand(OddModel):
    mixer = ByHand


class OddTurning(OddModel):
    mixer = Turning


class OddRepeating(OddModel, GenerationMixin):
    mixer = Repeating


class OddByExponents(OddModel):
    mixer = ByExponents


class OddWithSink(OddModel):
    mixer = WithSink


class OddSmoothing(OddModel):
    mixer = Smoothing


class OddTwoStreams(OddModel):
    block, mixer = TwoStreams, ByHand

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        x, positions = (self.words(input_ids),) * 2, torch.arange(input_ids.shape[1])[None]
        for block in self.tower:
            x = block(positions, x)
        return CausalLMOutputWithPast(logits=self.unwords(self.last(x[0] + x[1])))


class NoBlocks(OddModel):
    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        del self.tower

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.unwords(self.last(self.words(input_ids))))


class Raising(OddModel):
    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        super().forward(input_ids)
        raise KeyError("pixel_values")


def draw(kind: type[OddModel], seed: int = 0) -> OddModel:
    """A model of that kind, weights drawn, in eval mode."""
    model = kind(OddConfig(attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model
