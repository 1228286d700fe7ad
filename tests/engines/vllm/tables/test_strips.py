"""Which kept things are cut out at once: neighbours that are alike, and no others."""

from typing import Any

import pytest
import torch

from jackfield.engines.vllm.tables.ops import Keeper, Kept
from jackfield.engines.vllm.tables.strips import Strips
from jackfield.interleave.site import Port, Site
from jackfield.interventions.places import Place


def keeper(layer: int, width: int = 4, dtype: torch.dtype = torch.float32, **other: Any) -> Keeper:
    place = Place("layer_output", layer)
    kept = Kept(str(place), Site(f"layers.{layer}", Port.OUTPUT), width, dtype, ((0, width),))
    return Keeper(kept, place, (width,), other.get("reduce"), other.get("positions", "all"))


def found(keepers: list[Keeper], columns: list[int]) -> list[tuple[list[str], int]]:
    first = {each.kept: column for each, column in zip(keepers, columns, strict=True)}
    return [([name.split(".")[1] for name in strip.names], strip.column) for strip in Strips(keepers).of(first)]


@pytest.mark.parametrize(
    ("keepers", "columns", "strips"),
    [
        ([keeper(0), keeper(1), keeper(2)], [0, 4, 8], [(["0", "1", "2"], 0)]),
        ([keeper(0), keeper(1), keeper(2)], [0, 4, 12], [(["0", "1"], 0), (["2"], 12)]),  # another's in between
        ([keeper(0), keeper(1)], [4, 0], [(["0"], 4), (["1"], 0)]),
        ([keeper(0), keeper(1, width=2), keeper(2, width=2)], [0, 4, 6], [(["0"], 0), (["1", "2"], 4)]),
        ([keeper(0), keeper(1, positions="prompt")], [0, 4], [(["0"], 0), (["1"], 4)]),
        ([keeper(0), keeper(1, dtype=torch.bfloat16)], [0, 4], [(["0"], 0), (["1"], 4)]),
        ([], [], []),
    ],
    ids=["neighbours", "a gap", "another order", "other widths", "other positions", "another dtype", "none"],
)
def test_neighbours_that_are_alike_are_one_strip(
    keepers: list[Keeper], columns: list[int], strips: list[tuple[list[str], int]]
) -> None:
    assert found(keepers, columns) == strips


def test_it_is_found_again_where_the_columns_have_moved() -> None:
    keepers = [keeper(0), keeper(1)]
    strips = Strips(keepers)
    assert [strip.column for strip in strips.of({keepers[0].kept: 0, keepers[1].kept: 8})] == [0, 8]
    assert [strip.column for strip in strips.of({keepers[0].kept: 8, keepers[1].kept: 12})] == [8]


def test_what_is_reduced_is_no_strip() -> None:
    assert Strips([keeper(0)]).are_all
    assert not Strips([keeper(0), keeper(1, reduce="mean")]).are_all
