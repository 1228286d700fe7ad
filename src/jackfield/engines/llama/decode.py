"""Making tokens, one step at a time, from the cache.

Not for stopping, text or requests: an engine does that. Prompts of different lengths stand in one batch, padded on
the left, so that their newest tokens share a column; positions count from each prompt's own first token.
"""

from collections.abc import Generator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jackfield.axes import TokenIds
from jackfield.engines.llama.layers import Transformer


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[TokenIds, Int[Tensor, " batch"]]:
    """The prompts in one tensor, and how many columns at the start of each row are padding (token 0)."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows), torch.tensor(padding)


def decode(
    model: Transformer, prompts: Sequence[Sequence[int]]
) -> Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]:
    """Yields each step's logits, and wants the next tokens sent back; step 0 is the whole prompts.

    `steps = decode(model, [[1, 5, 9], [1, 7]])`, `logits = next(steps)`, then `logits = steps.send(sample(logits))`.
    """
    device = model.tok_embeddings.weight.device
    tokens, padding = (tensor.to(device) for tensor in left_pad(prompts))
    pad = padding if padding.any() else None
    start_pos = 0
    while True:
        with torch.no_grad():
            logits = model(tokens, start_pos, padding=pad, last_row=True)
        start_pos += tokens.shape[1]
        tokens = (yield logits[:, -1]).to(device)[:, None]


def sample(
    logits: Float[Tensor, "batch vocab"],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " batch"]:
    """The next tokens: the likeliest at temperature 0, else drawn in proportion.

    They are drawn from the `top_k` likeliest (0: all), and of these from the fewest that reach `top_p` together.
    """
    if temperature == 0:
        return logits.argmax(-1)
    ordered, ids = (logits.float() / temperature).sort(-1, descending=True)
    if top_k > 0:
        ordered[:, top_k:] = -torch.inf
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(-1)
