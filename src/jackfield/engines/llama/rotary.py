"""The rotary embedding: each pair of channels, as one complex number, is turned by its position times a frequency.

Channels are in Meta's order, pairs (0, 1), (2, 3), ... turning together, because that is what complex numbers are.
They are announced in transformers' order, pairs (0, d/2), (1, d/2 + 1), ..., as on every engine.
"""

import math
from typing import TypeAlias

import torch
from jaxtyping import Complex64
from torch import Tensor

from jackfield.axes import HeadOutputs, Queries
from jackfield.engines.llama.args import RopeScaling
from jackfield.engines.llama.tapped import wide

Frequencies: TypeAlias = Complex64[Tensor, "*batch token pair"]


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
