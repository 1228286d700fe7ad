"""Plain transformers, and the same jobs by hand: forward hooks, and `output_attentions` of eager attention."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.jobs import LONG_LAYER, NEW_TOKENS, Cases
from bench.models import Models


def cases(models: Models) -> Cases:
    """`forward` computes logits at every position, `generate` at the last alone, of which it takes a token."""
    return {"forward": partial(forward, models), "generate": partial(generate, models), **_BY_HAND[models.job](models)}


def forward(models: Models) -> Sequence[Tensor]:
    with torch.no_grad():
        return [models.plain(models.ids).logits]


def generate(models: Models) -> Sequence[Tensor]:
    return [generated(models.plain, models)]


def generated(model: PreTrainedModel, models: Models) -> Tensor:
    """Greedy tokens: 32 where generating is the job, or one."""
    new = NEW_TOKENS if models.job == "generation" else 1
    mask = torch.ones_like(models.ids)
    return model.generate(models.ids, attention_mask=mask, max_new_tokens=new, do_sample=False)


def streams(models: Models, layers: slice = slice(None)) -> Sequence[Tensor]:
    """Every layer's output, on every step, copied as it passes."""
    with kept(models.plain.model.layers[layers]) as found:
        generated(models.plain, models)
    return found


def patterns(model: PreTrainedModel, models: Models) -> Sequence[Tensor]:
    with torch.no_grad():
        return model(models.ids, output_attentions=True).attentions


def edits(models: Models) -> Sequence[Tensor]:
    with hooked(models.plain.model.layers, lambda output: output * 1.01):
        return [generated(models.plain, models)]


@contextmanager
def kept(layers: Sequence[nn.Module]) -> Generator[list[Tensor], None, None]:
    """What these layers give while this is open."""
    found: list[Tensor] = []
    with hooked(layers, lambda output: found.append(output.clone())):
        yield found


@contextmanager
def hooked(layers: Sequence[nn.Module], function: Callable[[Tensor], Tensor | None]) -> Generator[None, None, None]:
    """Calls `function` with each of these layers' outputs; what it returns, if anything, goes on in its place."""
    handles = [layer.register_forward_hook(lambda module, args, output: function(output)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generation(models: Models) -> Cases:
    return {"streams": partial(streams, models)}


def _prompt(models: Models) -> Cases:
    return {"streams": partial(streams, models), "patterns": partial(patterns, models.twin("eager"), models)}


def _long(models: Models) -> Cases:
    return {"layer": partial(streams, models, slice(LONG_LAYER, LONG_LAYER + 1))}


def _overhead(models: Models) -> Cases:
    return {"reads": partial(streams, models), "edits": partial(edits, models)}


_BY_HAND = {"generation": _generation, "prompt": _prompt, "long": _long, "overhead": _overhead}
