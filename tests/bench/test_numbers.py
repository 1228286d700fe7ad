"""The benchmark's own arithmetic."""

import pytest

from bench.numbers import Spread, added, ratio, scaled, spread


def test_a_spread_is_a_median_between_quartiles():
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.25, 1.75, 2)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_a_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to take a median of"):
        spread([])


def test_ratios_are_taken_pair_by_pair():
    # The machine slows down fourfold after the first pair.
    assert ratio([1.1, 4.4, 4.4], [1.0, 4.0, 4.0]) == Spread(*[pytest.approx(1.1)] * 3, 3)
    assert ratio([1.0, 2.0, 9.0], [1.0, 4.0, 3.0]).median == 1.0  # the medians' is 2 / 3


def test_pairs_must_be_complete():
    with pytest.raises(ValueError, match="longer than argument 1"):
        ratio([1.0], [1.0, 2.0])


def test_added_time_is_a_difference_of_pairs():
    assert added([3.0, 10.0, 5.0], [1.0, 7.0, 4.0]) == Spread(2.0, 1.5, 2.5, 3)
    assert scaled(Spread(2.0, 1.5, 2.5, 3), 10.0) == Spread(20.0, 15.0, 25.0, 3)
