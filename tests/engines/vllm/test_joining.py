"""Which part of a value a rank has, by numbers: whole, side by side, several times over, summed later, or refused."""

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.engines.vllm.joining import joined
from jackfield.engines.vllm.parts import WHOLE_PART, Joint, Ranks, SideBySide, Summed
from jackfield.engines.vllm.seen import Seen, Tolerance
from jackfield.engines.vllm.structure import BlockStructure, Structure
from jackfield.interleave.site import Port, Site
from tests.engines.vllm.ranks_in_threads import on_ranks

BLOCK = BlockStructure("b", "b.attn", "b.attn.op", (), ("b.mlp",), ("b.mlp.down",), (), ("b.attn.qkv",))
STRUCTURE = Structure((BLOCK,), None, ())
ENTERING = Site("b", Port.INPUT)
NEAR = Tolerance.of(torch.float32)


def numbers(seed: int, width: int) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed))


def of(site: Site, parts: list[Tensor]) -> list[tuple[Tensor, Joint | None]]:
    """The whole, and how it is had, of a site at which each rank saw its part."""
    stream = Seen(ENTERING, numbers(0, 8))

    def body(ranks: Ranks) -> tuple[Tensor, Joint | None]:
        seen, joints = joined(ranks, STRUCTURE, [stream, Seen(site, parts[ranks.rank])], NEAR)
        assert joints[ENTERING] is WHOLE_PART
        return seen[1].x, joints.get(site)

    return on_ranks(len(parts), body)


def test_what_is_equal_everywhere_is_whole() -> None:
    for whole, joint in of(Site("b.mlp", Port.OUTPUT), [numbers(1, 8)] * 2):
        assert whole.equal(numbers(1, 8))
        assert joint is WHOLE_PART


@pytest.mark.parametrize(
    "site",
    [
        Site("b.mlp.down", Port.INPUT),
        Site("b.attn.qkv", Port.OUTPUT),
        Site("b.attn.op", Port.ATTEND, "q"),
        Site("b.attn.op", Port.HEADS),
    ],
    ids=str,
)
def test_heads_and_neurons_stand_side_by_side(site: Site) -> None:
    """Of the stream's width as well, where nothing but their place tells that they are no addends of it."""
    parts = [numbers(1, 8), numbers(2, 8)]
    for whole, joint in of(site, parts):
        assert whole.equal(torch.cat(parts, 1))
        assert isinstance(joint, SideBySide)


def test_fewer_key_heads_than_ranks_stand_several_times() -> None:
    first, second = numbers(1, 4), numbers(2, 4)
    for whole, joint in of(Site("b.attn.op", Port.ATTEND, "k"), [first, first, second, second]):
        assert whole.equal(torch.cat([first, second], 1))
        assert joint is not None
        assert joint.count(1) == 2


def test_parts_of_the_stream_that_differ_are_addends() -> None:
    for whole, joint in of(Site("b.mlp", Port.OUTPUT), [numbers(1, 8), numbers(2, 8)]):
        torch.testing.assert_close(whole, numbers(1, 8) + numbers(2, 8))
        assert isinstance(joint, Summed)


@pytest.mark.parametrize("widths", [(6, 6), (6, 5)])
def test_anything_else_is_not_had(widths: tuple[int, int]) -> None:
    """Kills: a rank's own part that is served as the whole."""
    for whole, joint in of(Site("b.mlp", Port.OUTPUT), [numbers(1, widths[0]), numbers(2, widths[1])]):
        assert not whole.numel()
        assert joint is None


def test_one_rank_has_everything() -> None:
    seen = [Seen(ENTERING, numbers(0, 8))]
    (found,) = on_ranks(1, lambda ranks: joined(ranks, STRUCTURE, seen, NEAR))
    assert found == (seen, {ENTERING: WHOLE_PART})


def test_ranks_that_heard_different_sites_are_no_model() -> None:
    def body(ranks: Ranks) -> None:
        with pytest.raises(jf.UnsupportedModel, match="not the same on each"):
            joined(ranks, STRUCTURE, [Seen(Site(str(ranks.rank), Port.INPUT), numbers(0, 8))], NEAR)

    on_ranks(2, body)
