"""A process's turns: who goes first, and what is checked before anything is timed."""

import pytest
import torch

from bench.jobs import Job
from bench.memory import measured, resident
from bench.worker import check, rotated


def test_everyone_goes_first_in_turn():
    assert [rotated(["a", "b", "c"], by) for by in (0, 1, 5)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


RIGHT = [torch.ones(2, 3), torch.ones(3)]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (RIGHT[:1], "read 1 tensors, and 2 by hand"),
        ([torch.ones(2, 3), torch.ones(1)], "tensor 1: not what is read by hand"),
        ([torch.ones(2, 3) * 1.001, torch.ones(3)], "tensor 0: not what is read by hand"),
        ([torch.full((2, 3), float("nan")), torch.ones(3)], "tensor 0: not what is read by hand"),
    ],
    ids=["too few", "another shape", "other numbers", "not a number"],
)
def test_a_library_that_reads_something_else_is_not_timed(read, message):
    with pytest.raises(ValueError, match=message):
        check("nnsight", {"nnsight.streams": read, "by hand.streams": RIGHT})


def test_what_agrees_and_what_reads_nothing_is_timed():
    check("nnsight", {"nnsight.streams": RIGHT, "by hand.streams": RIGHT, "nnsight.untouched": []})


def test_memory_knows_a_peak_from_what_is_kept():
    def case() -> list[torch.Tensor]:
        peak = torch.ones(24_000_000)
        return [peak[:6_000_000].clone()]

    found = measured(case)
    assert found["peak_bytes"] == pytest.approx(120e6, rel=0.1)
    assert found["kept_bytes"] == pytest.approx(24e6, rel=0.25)


def test_a_field_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="no VmNothing"):
        resident("VmNothing")


@pytest.mark.parametrize(("once_s", "repeats"), [(1.0, 5), (0.01, 500), (100.0, 1)], ids=["some", "fast", "too slow"])
def test_a_turn_is_what_the_budget_has_room_for(once_s, repeats):
    assert Job("prompt", budget_s=30.0).repeats(once_s, rounds=6) == repeats
