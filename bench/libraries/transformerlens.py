"""TransformerLens: a bridge over the same model, which makes its attention eager; `run_with_cache` with names.

There is no generation here: `run_with_cache` is for one forward pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from bench.jobs import LONG_LAYER, Cases
from bench.models import Models


def cases(models: Models) -> Cases:
    own = _CASES.get(models.job)
    if own is None:
        return {}
    name = models.plain.config.name_or_path or "a model without a name"
    bridge = TransformerBridge.boot_transformers(name, hf_model=models.twin("eager"), tokenizer=models.tokenizer)
    return {name: partial(_without_gradients, case, bridge.eval(), models.ids) for name, case in own.items()}


def _without_gradients(case: Callable[[Any, Tensor], Sequence[Tensor]], bridge: Any, ids: Tensor) -> Sequence[Tensor]:
    with torch.no_grad():
        return case(bridge, ids)


def untouched(bridge: Any, ids: Tensor) -> Sequence[Tensor]:
    bridge(ids)
    return []


def streams(bridge: Any, ids: Tensor) -> Sequence[Tensor]:
    return _cached(bridge, ids, [f"blocks.{layer}.hook_out" for layer in range(bridge.cfg.n_layers)])


def patterns(bridge: Any, ids: Tensor) -> Sequence[Tensor]:
    return _cached(bridge, ids, [f"blocks.{layer}.attn.hook_pattern" for layer in range(bridge.cfg.n_layers)])


def layer(bridge: Any, ids: Tensor) -> Sequence[Tensor]:
    return _cached(bridge, ids, [f"blocks.{LONG_LAYER}.hook_out"])


def edits(bridge: Any, ids: Tensor) -> Sequence[Tensor]:
    names = (f"blocks.{layer}.hook_out" for layer in range(bridge.cfg.n_layers))
    bridge.run_with_hooks(ids, fwd_hooks=[(name, lambda stream, hook: stream * 1.01) for name in names])
    return []


def _cached(bridge: Any, ids: Tensor, names: list[str]) -> Sequence[Tensor]:
    _, cache = bridge.run_with_cache(ids, names_filter=names)
    return [cache[name] for name in names]


_CASES = {
    "prompt": {"untouched": untouched, "streams": streams, "patterns": patterns},
    "long": {"layer": layer},
    "overhead": {"untouched": untouched, "reads": streams, "edits": edits},
}
