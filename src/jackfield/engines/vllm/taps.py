"""Taps: one opaque in-place op at a module's input or output, and what it does while a forward pass is watched.

torch.compile carries the op as it is, on whole tensors. Two taps on views of one tensor come out of it wrong (torch
2.11 and 2.13), and queries and keys are views of what their projection gives: taps stand at the projection itself.
Outside a watched pass the op does nothing: in vLLM's own warm-up, in passes without a traced request, and in what a
block runs of the model by itself.
"""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn


class Watcher(Protocol):
    """What a forward pass tells of its tensors: at a module's tap, and before and after an attention op."""

    def tap(self, site: int, x: Tensor, residual: Tensor | None) -> None: ...
    def before(self, tap: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> None: ...
    def behind(self, tap: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, output: Tensor) -> None: ...


NOW: ContextVar[Watcher | None] = ContextVar("jackfield_pass", default=None)
"""The forward pass that is being watched. Blocks have a context of their own, in which there is none."""

_LIBRARY = torch.library.Library("jackfield", "FRAGMENT")
_LIBRARY.define("tap(Tensor(a!) x, Tensor(b!)? residual, int site) -> ()")


def _tap(x: Tensor, residual: Tensor | None, site: int) -> None:
    now = NOW.get()
    if now is not None:
        now.tap(site, x, residual)


def _nothing(x: Tensor, residual: Tensor | None, site: int) -> None:
    del x, residual, site


_LIBRARY.impl("tap", _tap, "CompositeExplicitAutograd")
_LIBRARY.impl("tap", _nothing, "Meta")


def tap_inputs(module: nn.Module, site: int) -> None:
    """Taps what `module` is called with: its first floating tensor, and the second where that has the same shape."""
    _wrap(module, site, None)


def tap_outputs(module: nn.Module, site: int) -> None:
    """Taps what `module` returns, by the same rule."""
    _wrap(module, None, site)


def _wrap(module: nn.Module, before: int | None, after: int | None) -> None:
    forward = module.forward

    def tapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            _call(_pair((*args, *kwargs.values())), before)
        result = forward(*args, **kwargs)
        if after is not None:
            _call(_pair(cast("tuple[Any, ...]", result) if isinstance(result, tuple) else (result,)), after)
        return cast("Any", result)

    module.forward = tapped


def _call(pair: tuple[Tensor | None, Tensor | None], site: int) -> None:
    x, residual = pair
    if x is not None:
        torch.ops.jackfield.tap(x, residual, site)


def _pair(values: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The stream's two halves, or the one tensor that it is: what else a block takes has another shape."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1]
    if not tensors:
        return None, None
    twins = [tensor for tensor in tensors[1:] if tensor.shape == tensors[0].shape and tensor is not tensors[0]]
    return tensors[0], twins[0] if twins else None


def named(module: nn.Module) -> Mapping[str, nn.Module]:
    """Every module by its path; one that stands at several has each."""
    return dict(cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False)))
