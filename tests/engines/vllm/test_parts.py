"""Parts and wholes: heads have the model's numbers on every rank, and an edit reaches the rank that has them."""

import pytest
import torch
from torch import Tensor

from jackfield.engines.vllm.parts import WHOLE_PART, Joint, Ranks, SideBySide, Summed
from jackfield.interleave.channel import WHOLE, Selection
from tests.engines.vllm.ranks_in_threads import on_ranks

HEADS = torch.arange(24.0).view(2, 4, 3)  # token, head, width


def test_parts_side_by_side_are_in_the_order_of_the_ranks() -> None:
    """Kills: heads that are numbered anew on each rank."""

    def body(ranks: Ranks) -> Tensor:
        joint = SideBySide(ranks)
        part = HEADS[:, 2 * ranks.rank : 2 * ranks.rank + 2]
        assert joint.cut(HEADS, 1).equal(part)
        assert joint.count(2) == 4
        return joint.join(part, 1)

    for whole in on_ranks(2, body):
        assert whole.equal(HEADS)


def test_heads_that_several_ranks_have_count_once() -> None:
    """Of two key heads on four ranks, each stands on two."""

    def body(ranks: Ranks) -> Tensor:
        joint = SideBySide(ranks, repeat=2)
        part = HEADS[:, ranks.rank // 2 : ranks.rank // 2 + 1]
        assert joint.cut(HEADS[:, :2], 1).equal(part)
        assert joint.count(1) == 2
        return joint.join(part, 1)

    for whole in on_ranks(4, body):
        assert whole.equal(HEADS[:, :2])


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ((3, 0), [([1], (0,)), ([0], (1,))]),
        ((1,), [([0], (1,)), ([], ())]),
        ((2, 3), [([], ()), ([0, 1], (0, 1))]),
    ],
)
def test_a_selection_is_cut_to_the_heads_that_are_here(heads: tuple[int, ...], expected: list[object]) -> None:
    """Kills: an edit that is not cut, or cut by another rank's numbers."""

    def body(ranks: Ranks) -> tuple[object, object]:
        places, own = SideBySide(ranks).own(Selection(heads, (1,)), 2)
        assert own.tokens == (1,)
        return places, own.heads

    assert on_ranks(2, body) == expected


def test_all_heads_are_cut_to_those_that_are_here() -> None:
    assert on_ranks(2, lambda ranks: SideBySide(ranks).own(WHOLE, 2)) == [(slice(0, 2), WHOLE), (slice(2, 4), WHOLE)]


def test_addends_are_summed_and_an_edit_is_one_ranks_alone() -> None:
    def body(ranks: Ranks) -> Tensor:
        joint = Summed(ranks)
        assert joint.join(joint.cut(HEADS, -1), -1).equal(HEADS)
        return joint.join(HEADS * (ranks.rank + 1), -1)

    for whole in on_ranks(2, body):
        assert whole.equal(HEADS * 3)


def test_what_every_rank_has_is_nobodys_part() -> None:
    joint: Joint = WHOLE_PART
    assert joint.join(HEADS, 1) is HEADS
    assert joint.cut(HEADS, 1) is HEADS
    assert joint.own(Selection((1,)), 4) == (slice(None), Selection((1,)))
