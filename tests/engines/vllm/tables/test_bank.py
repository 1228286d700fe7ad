"""The tables' memory: what is taken and given back, what is shared, and what happens when it is full."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jackfield.engines.vllm.tables.bank import Bank, Room
from jackfield.engines.vllm.tables.columns import Columns
from jackfield.engines.vllm.tables.ops import BANK, Act, Kind, Numbers, Op, Part
from jackfield.interleave.site import Port, Site

SITES = {Site("a", Port.OUTPUT): 0, Site("b", Port.OUTPUT): 1}
A, B = SITES


@given(st.lists(st.integers(1, 9), max_size=12), st.randoms())
def test_places_are_nobodys_twice_and_come_back(sizes: list[int], chance: "object") -> None:
    room, held = Room(32), dict[int, int]()
    for size in sizes:
        first = room.take(size)
        if first is None:
            continue
        assert not set(range(first, first + size)) & {
            place for at, many in held.items() for place in range(at, at + many)
        }
        held[first] = size
        if len(held) > 2:
            gone = chance.choice(sorted(held))  # type: ignore[attr-defined]
            room.give(gone, held.pop(gone))
    for first, size in held.items():
        room.give(first, size)
    assert room.take(32) == 0


def bank(**sizes: int) -> Bank:
    return Bank(SITES, torch.device("cpu"), **{"numbers": 64, "ops": 8, "recipes": 4, **sizes})


def steers(*sites: Site, width: int = 8) -> Part:
    return Part({site: [Op(Kind.STEER, site, False, 0, width, act=0, count=1)] for site in sites})


def vector(value: float, width: int = 8) -> Act:
    return Act(2.0, Numbers.of(torch.full((1, width), value)))


def test_a_recipe_stands_in_the_tables_once_they_are_sent() -> None:
    tables = bank()
    entry = tables.add(steers(A, B), [vector(3.0)], Columns())
    assert entry is not None
    assert not tables.ops.any()
    tables.send()
    assert tables.ranges[entry.number].tolist() == [[entry.first, entry.first + 1], [entry.first + 1, entry.first + 2]]
    rows = tables.ops[entry.first : entry.first + 2]
    assert rows[:, 6].contiguous().view(torch.float32).tolist() == [2.0, 2.0]
    assert tables.numbers[rows[0, BANK] :][:9].tolist() == [3.0] * 8 + [0.0]


def test_equal_vectors_stand_there_once_and_go_with_the_last() -> None:
    tables = bank(numbers=9)
    first, second = (tables.add(steers(A), [vector(3.0)], Columns()) for _ in range(2))
    assert first is not None
    assert second is not None
    assert tables.add(steers(A), [vector(4.0)], Columns()) is None
    tables.remove(first)
    assert tables.add(steers(A), [vector(4.0)], Columns()) is None
    tables.remove(second)
    assert tables.add(steers(A), [vector(4.0)], Columns()) is not None


@pytest.mark.parametrize("full", ["numbers", "ops", "recipes"])
def test_where_there_is_no_room_nothing_is_taken(full: str) -> None:
    tables = bank(**{full: {"numbers": 12, "ops": 3, "recipes": 1}[full]})
    held = tables.add(steers(A, B), [vector(1.0)], Columns())
    assert held is not None
    assert tables.add(steers(A, B), [vector(2.0)], Columns()) is None
    tables.remove(held)
    again = tables.add(steers(A, B), [vector(2.0)], Columns())
    assert again is not None
    tables.send()
    assert tables.numbers[int(tables.ops[again.first, BANK])] == 2.0


def test_what_is_written_last_to_a_place_stays() -> None:
    tables = bank()
    first = tables.add(steers(A, B), [vector(1.0)], Columns())
    assert first is not None
    tables.remove(first)
    tables.add(steers(B), [vector(5.0)], Columns())
    tables.send()
    assert tables.numbers[:8].tolist() == [5.0] * 8
    assert tables.ranges[0].tolist() == [[0, 0], [0, 1]]
