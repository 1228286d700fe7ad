"""A block is the same on all ranks: its random numbers, and an error where it is not."""

import random

import numpy as np
import pytest
import torch

import jackfield as jf
from jackfield.engines.vllm.alike import Alike, Randomness
from jackfield.engines.vllm.parts import Ranks
from tests.engines.vllm.ranks_in_threads import on_ranks

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_the_same_name_draws_the_same_numbers_wherever_it_is() -> None:
    one, other, another = (Randomness(name, CPU) for name in ("a", "a", "b"))
    with one.own():
        first = drawn()
    drawn()  # of the process itself, which is elsewhere on each rank
    with other.own():
        assert drawn() == first
    with another.own():
        assert not set(drawn()) & set(first)


def test_it_goes_on_where_it_stopped() -> None:
    one, whole = Randomness("a", CPU), Randomness("a", CPU)
    with whole.own():
        expected = [drawn(), drawn()]
    found = []
    for _ in range(2):
        with one.own():
            found.append(drawn())
        drawn()
    assert found == expected


def test_the_numbers_of_the_process_stay_its_own() -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = drawn(), drawn()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    first = drawn()
    with Randomness("a", CPU).own():
        drawn()
    assert (first, drawn()) == expected


def test_blocks_that_part_are_told_so_on_every_rank_and_stay_apart() -> None:
    def body(ranks: Ranks) -> list[str]:
        alike, heard = Alike(ranks, Randomness("a", CPU)), list[str]()
        alike.check("it reads one value")
        for what in (f"it reads value {ranks.rank}", "it reads one value"):
            with pytest.raises(jf.TracingError, match="not do the same on all 2 ranks") as error:
                alike.check(what)
            heard.append(str(error.value))
        return heard

    first, second = on_ranks(2, body)
    assert "on rank 0 it reads value 0" in first[0]
    assert "on rank 1 it reads value 1" in second[0]
