"""Prompts of many lengths, for any vocabulary of 32, and what hooks see of them."""

import random
from typing import Any

import torch
from torch import Tensor, nn


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids from 3 on: those before it begin and end a text."""
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 32) for _ in range(drawn.randrange(2, 12))] for _ in range(count)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hooked(module: nn.Module, part: str, token_ids: list[int]) -> Tensor:
    """What leaves a part of a transformers model, run by itself on one prompt: [token, width]."""
    seen: list[Any] = []
    hook = module.get_submodule(part).register_forward_hook(lambda _, args, output: seen.append(output))
    with torch.no_grad():
        module(torch.tensor([token_ids]))
    hook.remove()
    return (seen[0] if isinstance(seen[0], Tensor) else seen[0][0])[0]
