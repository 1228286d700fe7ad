"""Which output projections are given just what an attention op made: found by numbers, in a pass of no request."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jackfield.engines.vllm.direct import Fed, fed_directly

FED = Fed("block.attention.out", "block.attention.op")


class Impl:
    """An op's implementation, as vLLM's write into `output`."""

    def forward(self, x: Tensor, output: Tensor | None = None) -> Tensor:
        return x if output is None else output.copy_(x.view(output.shape))


class Attention(nn.Module):
    """Heads of 2 x 3, and what is done to them before the projection."""

    def __init__(self, between: Any, *, in_place: bool = True) -> None:
        super().__init__()
        self.impl, self.between, self.in_place = Impl(), between, in_place
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        output = x.new_empty(x.shape[0], 2, 3) if self.in_place else None
        made = self.impl.forward(x, output=output)
        return self.out(self.between(made).reshape(x.shape[0], -1))


def found(attention: Attention, *, called: bool = True) -> frozenset[Fed]:
    run = (lambda: attention(torch.zeros(20, 6))) if called else lambda: attention.out(torch.zeros(20, 6))
    return fed_directly([FED], {FED.projection: attention.out}, {FED.op: attention.impl}, run)


@torch.no_grad()
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("between", [lambda made: made, lambda made: made.clone()], ids=["as it is", "a copy"])
def test_what_the_op_feeds(between: Any, in_place: bool) -> None:
    assert found(Attention(between, in_place=in_place)) == {FED}


@torch.no_grad()
@pytest.mark.parametrize(
    "between",
    [
        lambda made: made.mul_(0.5),
        lambda made: made * 0.5,
        lambda made: made.flip(1),
        lambda made: made.repeat(1, 2, 1),
    ],
    ids=["gated in place", "gated", "heads in another order", "wider"],
)
def test_what_something_else_comes_between(between: Any) -> None:
    """Kills: an edit of the projection's input that the gate would have worked on."""
    attention = Attention(between)
    attention.out = nn.Linear(attention.between(torch.zeros(1, 2, 3)).numel(), 4)
    assert not found(attention)


@torch.no_grad()
def test_an_op_that_did_not_run_feeds_nothing_and_all_is_as_it_was() -> None:
    attention = Attention(lambda made: made)
    assert not found(attention, called=False)
    assert found(attention)
    assert "forward" not in vars(attention.out)
    assert "forward" not in vars(attention.impl)
