"""Output projections that are given just what an attention op made, and so need no tap in compiled code.

There it would stand on a view of what the op has written: torch.compile copies that before the tap and back behind it,
in every layer, whether anybody looks or not. The op's own tap is outside compiled code, and tells of it for nothing.
Which projections these are is found by numbers, in a pass of no request, before the model is compiled.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from jackfield.engines.vllm.structure import BlockStructure

Forward = Callable[..., Any]
ROWS: Final = 16
"""So many are compared, of a pass that may be as long as a batch can be."""


@dataclass(frozen=True, slots=True)
class Fed:
    """An output projection, by its path, and the attention op that may feed it."""

    projection: str
    op: str


def candidates(blocks: Sequence[BlockStructure]) -> list[Fed]:
    """The projections that stand in an attention with one op."""
    return [
        Fed(path, block.op)
        for block in blocks
        if block.op is not None and block.reason is None
        for path in block.projections
        if path.startswith(f"{block.attention}.") and path not in block.sublayers
    ]


def fed_directly(
    fed: Collection[Fed], modules: Mapping[str, nn.Module], impls: Mapping[str, Any], run: Callable[[], object]
) -> frozenset[Fed]:
    """Those whose projection is given, number by number, what the op has made.

    `impls`: the ops' implementations, by path. `run`: a pass, uncompiled, whose numbers nobody needs: what ops make is
    written over by random numbers, which nothing else can have by chance.
    """
    made: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for each in fed:
            stack.enter_context(_instead(impls[each.op], lambda forward, op=each.op: _marking(forward, op, made)))
            projection = modules[each.projection]
            stack.enter_context(
                _instead(projection, lambda forward, path=each.projection: _heeding(forward, path, given))
            )
        run()
    return frozenset(each for each in fed if _same(made.get(each.op), given.get(each.projection)))


@contextmanager
def _instead(owner: Any, make: Callable[[Forward], Forward]) -> Generator[None]:
    """Another forward on an instance, for a while."""
    own = cast("Forward | None", vars(owner).get("forward"))
    forward: Forward = owner.forward
    owner.forward = make(forward)
    try:
        yield
    finally:
        if own is None:
            del owner.forward
        else:
            owner.forward = own


def _marking(forward: Forward, op: str, made: dict[str, Tensor]) -> Forward:
    def marked(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        output = kwargs.get("output")
        output = result if output is None else output
        if isinstance(output, Tensor):
            made[op] = output.normal_()[:ROWS].clone()
        return result

    return marked


def _heeding(forward: Forward, path: str, given: dict[str, Tensor]) -> Forward:
    def heeded(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if tensors:
            given[path] = tensors[0][:ROWS].clone()
        return forward(*args, **kwargs)

    return heeded


def _same(made: Tensor | None, given: Tensor | None) -> bool:
    if made is None or given is None or made.numel() != given.numel():
        return False
    return torch.equal(made.reshape(-1), given.reshape(-1))
