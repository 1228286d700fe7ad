"""A scripted engine, which drives blocks as the real engines do: what the contract suite holds the others against.

It is a model of nothing. It takes the likeliest token and refuses every other sampling.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jackfield.axes import TokenIds
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
)
from jackfield.engines.inline import InlineTap
from jackfield.engines.inline_engine import InlineEngine
from jackfield.engines.prompt import Tokenizer
from jackfield.engines.request import Limits
from jackfield.errors import Unavailable, UnknownValue
from jackfield.interleave.channel import Channel

NO_MODULES = "the scripted engine has no modules at which raw tensors pass"


class FakeEngine(InlineEngine[Decoder]):
    """The scripted engine. At most `max_num_seqs` requests run in a batch."""

    name = "scripted"
    refused = (
        *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "bad_words", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs"),
    )

    def __init__(self, seed: int = 0, *, tokenizer: Tokenizer | None = None, max_num_seqs: int = 8) -> None:
        eos: int | None = getattr(tokenizer, "eos_token_id", None)
        decoder = Decoder(seed)
        self._pass = ForwardPass(decoder)  # of the batch that runs
        super().__init__(
            decoder,
            Facts(LAYERS, HEADS, 1, WIDTH, D_MODEL, D_MLP, VOCAB, torch.float32, torch.device("cpu")),
            Limits(VOCAB, CONTEXT, "CONTEXT"),
            tokenizer=tokenizer,
            config=None,
            eos_ids=frozenset(() if eos is None else (eos,)),
            max_batch_size=max_num_seqs,
        )

    def forward(self, tokens: TokenIds, columns: int, pads: Sequence[int], tap: InlineTap) -> Tensor:
        if columns == 0:
            self._pass = ForwardPass(self.model)
        return self._pass(tokens, columns, pads, tap)

    def raw_channel(self, path: str, port: str) -> Channel:
        raise Unavailable(f"{path}.{port} is not available: {NO_MODULES}.")

    def module(self, path: str) -> nn.Module:
        parts = path.split(".")
        if path and not (parts[0] == "layers" and parts[-1] in ("attention", "mlp", *map(str, range(LAYERS)))):
            raise UnknownValue(f"There is no module {path!r}: {NO_MODULES}.")
        return nn.Module()
