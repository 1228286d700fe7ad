"""Medians with their quartiles, of ratios and differences that are taken pair by pair.

Each time of a case stands beside the baseline's time of the same round, taken a moment before or after: what slows
the machine down for a while slows both, and leaves their ratio.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, the quartiles around it, and how many numbers it is of."""

    median: float
    lower: float
    upper: float
    count: int


def spread(numbers: Sequence[float]) -> Spread:
    """The median and quartiles of at least one number."""
    if not numbers:
        raise ValueError("there is nothing to take a median of")
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0], 1)
    lower, median, upper = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(median, lower, upper, len(numbers))


def ratio(case: Sequence[float], base: Sequence[float]) -> Spread:
    """How many times as long a case takes as its baseline."""
    return spread([one / other for one, other in zip(case, base, strict=True)])


def added(case: Sequence[float], base: Sequence[float]) -> Spread:
    """How much longer a case takes than its baseline, in the unit of both."""
    return spread([one - other for one, other in zip(case, base, strict=True)])


def scaled(of: Spread, factor: float) -> Spread:
    """The same in another unit, or shared out."""
    return Spread(of.median * factor, of.lower * factor, of.upper * factor, of.count)
