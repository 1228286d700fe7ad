"""The paged cache of an attention layer: how keys and values lie in it, found by writing known ones into it.

The layout differs by backend, by version and, on CPUs, by instruction set. Each is a function of a layer's cache;
the one that gives back what was put in is taken. Where none does, nothing is served from the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from jackfield.axes import Float

Keys = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""A cache tensor and the width of a key to keys and values, each [block, token, kv_head, width]; views or copies."""


def _beside(cache: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """[block, kv_head, token, key | value]: FlashAttention and Triton since vLLM 0.28."""
    return cache[..., :d_head].transpose(1, 2), cache[..., d_head:].transpose(1, 2)


def _behind(cache: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """[block, 2, token, kv_head, width]: FlashAttention from vLLM 0.23 to 0.27."""
    return cache[:, 0], cache[:, 1]


def _apart(cache: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """[2, block, token, kv_head, width]: FlashAttention before."""
    return cache[0], cache[1]


def _halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """[block, kv_head, key tokens then value tokens, width]: how CPUs view theirs."""
    blocks, heads, tokens, _ = cache.shape
    key, value = cache.reshape(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    return key, value


def _columns(cache: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """CPUs: each head's keys stand as [width, token]."""
    key, value = _halves(cache)
    blocks, heads, tokens, width = key.shape
    return key.reshape(blocks, heads, width, tokens).permute(0, 3, 1, 2), value.transpose(1, 2)


def _rows(cache: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """CPUs: keys and values as they are."""
    key, value = _halves(cache)
    return key.transpose(1, 2), value.transpose(1, 2)


def _tiles(cache: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """CPUs with AMX, two bytes an element: [token / 16, width / 2, 16, 2] and [width / 16, token / 2, 16, 2]."""
    key, value = _halves(cache)
    blocks, heads, tokens, width = key.shape
    keys = key.reshape(blocks, heads, tokens // 16, width // 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
    values = value.reshape(blocks, heads, width // 16, tokens // 2, 16, 2).permute(0, 3, 5, 1, 2, 4)
    return keys.reshape(blocks, tokens, heads, width), values.reshape(blocks, tokens, heads, width)


LAYOUTS: Final = MappingProxyType(
    {"beside": _beside, "behind": _behind, "apart": _apart, "columns": _columns, "rows": _rows, "tiles": _tiles}
)


@dataclass(frozen=True, slots=True)
class CacheReader:
    """Reads one layer's keys and values out of its cache."""

    layout: Keys
    d_head: int
    block_size: int

    @property
    def block_axis(self) -> int:
        """Of the cache."""
        return 1 if self.layout is _apart else 0

    def gather(self, cache: Tensor, blocks: Tensor, length: int, left: int = 0) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values that stand in these blocks [block]: [kv_head, token, width], copies.

        NaN where a window has let go of a block: one that lies in the first `left` positions, which no query sees any
        more and whose block may be another request's by now, or one whose place in the table holds 0, the block that
        vLLM keeps for itself. Nothing here waits for the device.
        """
        held = blocks[: -(-length // self.block_size)]
        found = self.layout(_pick(cache, held, self.layout), self.d_head)
        keys, values = (half.reshape(-1, *half.shape[2:])[:length].transpose(0, 1) for half in found)
        if left:
            lost = (held == 0) | (torch.arange(1, len(held) + 1, device=held.device) * self.block_size <= left)
            gone = lost.repeat_interleave(self.block_size)[:length, None]
            keys, values = (half.masked_fill(gone, float("nan")) for half in (keys, values))
        return keys, values


def _pick(cache: Tensor, blocks: Tensor, layout: Keys) -> Tensor:
    return cache[:, blocks] if layout is _apart else cache[blocks]


def probe(layer: Any, cache: Tensor) -> CacheReader | str:
    """How a layer's cache is read, or the reason why it cannot be.

    vLLM keeps block 0 for itself, as what padding points to: known keys are written there, read back, and taken out.
    """
    update = getattr(layer.impl, "do_kv_cache_update", None)  # not MLA; not before vLLM 0.20
    if update is None:
        return "this attention keeps its cache in a way that is not read"
    d_head, d_value = layer.head_size, getattr(layer, "head_size_v", layer.head_size)
    for block_size in _block_sizes(cache):
        keys, values = (
            torch.randn(block_size, layer.num_kv_heads, width, device=cache.device).to(layer_dtype(layer, cache))
            for width in (d_head, d_value)
        )
        if cache.dtype != keys.dtype:
            return f"its cache holds {cache.dtype}, which is not read"
        before = cache.clone() if cache.numel() < 2**20 else None
        update(layer, keys, values, cache, torch.arange(block_size, device=cache.device))
        found = _matching(cache, d_head, keys, values)
        _restore(cache, before, found)
        if found is not None:
            return CacheReader(found, d_head, block_size)
    return "keys written into its cache were not found there in any known layout"


def layer_dtype(layer: Any, cache: Tensor) -> torch.dtype:
    """The dtype of what a layer puts into its cache."""
    return getattr(layer, "kv_cache_torch_dtype", cache.dtype)


def _block_sizes(cache: Tensor) -> list[int]:
    return sorted({size for size in cache.shape[1:-1] if size >= 8 and size % 8 == 0}, reverse=True)[:2]


def _matching(
    cache: Tensor,
    d_head: int,
    keys: Float[Tensor, "token kv_head d_head"],
    values: Float[Tensor, "token kv_head d_value"],
) -> Keys | None:
    for layout in LAYOUTS.values():
        if layout is _apart and cache.shape[0] != 2:
            continue  # picking a block of it would copy a large part of another layout
        try:
            found = layout(_pick(cache, torch.zeros(1, dtype=torch.long, device=cache.device), layout), d_head)
        except (RuntimeError, IndexError, ValueError):  # a shape that is not this layout's
            continue
        if all(
            half[0].shape == put.shape and torch.equal(half[0], put)
            for half, put in zip(found, (keys, values), strict=True)
        ):
            return layout
    return None


def _restore(cache: Tensor, before: Tensor | None, layout: Keys | None) -> None:
    if before is not None:
        cache.copy_(before)
    elif layout is _apart:
        cache[:, 0] = 0
    else:
        cache[0] = 0
