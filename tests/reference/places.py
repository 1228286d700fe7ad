"""Hooks on modules and patches on functions that hand a tensor to a visitor and put back what it answers.

A visitor is called `visit(layer, name, tensor)` with the tensor in the contract's shape (layer None for the model's own
values). It returns that same tensor to change nothing, or another one, which takes its place in the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any  # whatever modules take and return

import torch
from torch import Tensor, nn
from torch.nn import functional

Visit = Callable[[int | None, str, Tensor], Tensor]
Change = Callable[[Tensor], Tensor]


def batched(change: Change) -> Change:
    """`change` for tensors [token, width] too: several routers and MLPs flatten the batch away."""

    def on_any(x: Tensor) -> Tensor:
        if x.ndim != 2:
            return change(x)
        standard = x[None]
        changed = change(standard)
        return x if changed is standard else changed[0]

    return on_any


def scaled(change: Change, factor: float) -> Change:
    """`change` applied to `factor * x`."""
    if factor == 1.0:
        return change

    def on_scaled(x: Tensor) -> Tensor:
        standard = x * factor
        changed = change(standard)
        return x if changed is standard else changed / factor

    return on_scaled


def indexed(change: Change, index: int | None) -> Change:
    """`change` applied to `x[index]`."""
    if index is None:
        return change

    def on_one(x: Tensor) -> Tensor:
        standard = x[index]
        changed = change(standard)
        if changed is standard:
            return x
        whole = x.clone()
        whole[index] = changed
        return whole

    return on_one


@contextmanager
def output_of(module: nn.Module, change: Change) -> Iterator[None]:
    """`change` sees the module's output, or the first of several."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        changed = change(first)
        if changed is first:
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def input_of(module: nn.Module, change: Change) -> Iterator[None]:
    """`change` sees the module's first argument, however it was passed."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            changed = change(args[0])
            return None if changed is args[0] else ((changed, *args[1:]), kwargs)
        name = next(iter(kwargs)) if "hidden_states" not in kwargs else "hidden_states"
        changed = change(kwargs[name])
        return None if changed is kwargs[name] else (args, kwargs | {name: changed})

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` for a while; an attribute that the instance did not have itself is gone afterwards."""
    own = vars(owner)
    missing = object()
    before = own.get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def router_logits_of(router: nn.Module, change: Change) -> Iterator[None]:
    """`change` sees the logits before the router picks experts by them.

    Routers return logits beside choices already made, so an edit of their output would change nothing. Inside their
    forward the one call of `linear` is what gives the logits.
    """
    linear = functional.linear

    def tapped(*args: Any, **kwargs: Any) -> Tensor:
        return change(linear(*args, **kwargs))

    def enter(*_: Any) -> None:
        functional.linear = tapped

    def leave(*_: Any) -> None:
        functional.linear = linear

    handles = [router.register_forward_pre_hook(enter), router.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        leave()
        for handle in handles:
            handle.remove()


def padded_to(x: Tensor, keys: int, fill: float, *, dim: int) -> Tensor:
    """`x` with `fill` in front on axis `dim`, so that index j there is absolute position j out of `keys`."""
    missing = keys - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x.new_full(shape, fill), x], dim=dim)
