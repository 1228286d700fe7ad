"""A scripted engine, which drives blocks as the real engines do: what the contract suite holds the others against.

It is a model of nothing. It takes the likeliest token and refuses every other sampling.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jackfield.engines.engine import Facts
from jackfield.engines.fake_decoder import (
    CONTEXT,
    D_MLP,
    D_MODEL,
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    Decoder,
    ForwardPass,
    by_head,
)
from jackfield.engines.fake_decoder import norm as normed
from jackfield.engines.inline import InlineRun
from jackfield.engines.inline_engine import InlineEngine
from jackfield.engines.progress import Progress
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Limits
from jackfield.errors import EngineDied, Unavailable, UnknownValue
from jackfield.interleave.worker import Channel
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, LayerAnatomy
from jackfield.values.part import Part

NO_MODULES = "the scripted engine has no modules at which raw tensors pass"


class FakeEngine(InlineEngine):
    """The scripted engine. At most `max_num_seqs` requests run in a batch."""

    name = "scripted"
    refused = (
        *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "bad_words", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs"),
    )

    def __init__(self, seed: int = 0, *, tokenizer: Tokenizer | None = None, max_num_seqs: int = 8) -> None:
        eos: int | None = getattr(tokenizer, "eos_token_id", None)
        self._decoder: Decoder | None = Decoder(seed)
        super().__init__(
            Facts(LAYERS, HEADS, 1, WIDTH, D_MODEL, D_MLP, VOCAB, torch.float32, torch.device("cpu")),
            Anatomy(tuple(map(_layer, range(LAYERS))), {}, None, None),
            Limits(VOCAB, CONTEXT, "CONTEXT"),
            tokenizer=tokenizer,
            config=None,
            eos_ids=frozenset(() if eos is None else (eos,)),
            max_batch_size=max_num_seqs,
        )

    @property
    def decoder(self) -> Decoder:
        """The weights; EngineDied after `close`."""
        if self._decoder is None:
            raise EngineDied("This model was closed.")
        return self._decoder

    def close(self) -> None:
        self._decoder = None

    def forward(self) -> ForwardPass:
        return ForwardPass(self.decoder)

    def chooser(self, run: InlineRun) -> "Likeliest":
        return Likeliest()

    def head_results(self, layer: int, premix: Tensor) -> Tensor:
        return by_head(premix, self.decoder.layers[layer].o)

    def project(self, x: Tensor, *, norm: bool) -> Tensor:
        return (normed(x) if norm else x) @ self.decoder.head.T

    def raw_channel(self, path: str, port: str) -> Channel:
        raise Unavailable(f"{path}.{port} is not available: {NO_MODULES}.")

    def module(self, path: str) -> nn.Module:
        parts = path.split(".")
        if path and not (parts[0] == "layers" and parts[-1] in ("attention", "mlp", *map(str, range(LAYERS)))):
            raise UnknownValue(f"There is no module {path!r}: {NO_MODULES}.")
        return nn.Module()

    def part(self, path: str) -> Part:
        raise UnknownValue(f"There is no module {path!r}: {NO_MODULES}.")


def _layer(number: int) -> LayerAnatomy:
    path = f"layers.{number}"
    attention = AttentionAnatomy(f"{path}.attention", False, HEADS, 1, WIDTH, WIDTH, WIDTH**-0.5)
    return LayerAnatomy(path, {}, attention, attention.path, f"{path}.mlp")


class Likeliest:
    """Chooses the likeliest token of every row."""

    def __call__(self, logits: Tensor, progress: Sequence[Progress]) -> list[int]:
        return [int(token) for token in logits.argmax(-1)]

    def logprobs(self, sample: int) -> None:
        """Refused on admission."""
