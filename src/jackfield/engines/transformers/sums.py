"""Which summands a stream is the sum of: bit for bit, as the model adds them, before as near as its dtype adds.

Near is not enough by itself. In bfloat16 a sum is known to two parts in a hundred of its largest number, and a summand
may be smaller than that; so what a near sum leaves over must be small beside every summand too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jackfield.engines.transformers.dataflow import Block, Term, close, least_squares, terms
from jackfield.engines.transformers.recording import Call

_LEFT_OVER = 0.2
"""How much of a summand, in length, a near sum may leave over."""

Candidates = Sequence[tuple[Call, Sequence[Call]]]
"""Calls whose result may be the attention's summand, each with those that may then be the MLP's; likeliest first."""


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The summands of a stream, and the stream after the first, [row, width]. `mlp` is None where one is all."""

    attention: Term
    mlp: Term | None
    middle: Tensor


def find_sum(block: Block, candidates: Candidates, factors: Sequence[float]) -> Sum | None:
    """The summands that make the stream that enters into the one that leaves; None where none do.

    `factors` are numbers that the block may multiply both summands with.
    """
    plain = list(_plain_pairs(block, candidates))
    return (
        _exact_sum(block, plain, (1.0, *factors))
        or _near_sum(block, [*plain, *_residual_pairs(block, candidates)])
        or _fitted_sum(block, plain, factors)
    )


def leaves_little(found: Tensor, expected: Tensor, summands: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether `found` [row, width] is `expected` to the exactness of `dtype`, and no summand is lost in the rest."""
    if not close(found, expected, dtype):
        return False
    rest = float((found.double() - expected.double()).square().sum())
    return all(rest <= _LEFT_OVER**2 * float(summand.double().square().sum()) for summand in summands)


def _plain_pairs(block: Block, candidates: Candidates) -> Iterator[tuple[Term, Term | None]]:
    """Results as they are; one summand alone comes last."""
    firsts = [next(terms(block, mixer)) for mixer, _ in candidates]
    for attention, (_, rests) in zip(firsts, candidates, strict=True):
        yield from ((attention, next(terms(block, rest))) for rest in rests)
    yield from ((attention, None) for attention in firsts)


def _residual_pairs(block: Block, candidates: Candidates) -> Iterator[tuple[Term, Term | None]]:
    """Results less a stream that was passed in."""
    for mixer, rests in candidates:
        for attention in terms(block, mixer):
            yield from ((attention, mlp) for rest in rests for mlp in terms(block, rest))
            yield attention, None


def _exact_sum(block: Block, pairs: Sequence[tuple[Term, Term | None]], factors: Sequence[float]) -> Sum | None:
    entering, leaving = block.entering.rows, block.leaving.rows
    for factor in factors:
        for attention, mlp in pairs:
            first = attention.value if factor == 1.0 else attention.value * factor
            second = None if mlp is None else mlp.value if factor == 1.0 else mlp.value * factor
            if any(torch.equal(total, leaving) for total in _totals(entering, first, second)):
                return Sum(_scaled(attention, factor), None if mlp is None else _scaled(mlp, factor), entering + first)
    return None


def _totals(entering: Tensor, first: Tensor, second: Tensor | None) -> Iterator[Tensor]:
    """The sum in each order that blocks add in."""
    if second is None:
        yield entering + first
        return
    yield entering + first + second
    yield first + second + entering
    yield entering + second + first


def _near_sum(block: Block, pairs: Sequence[tuple[Term, Term | None]]) -> Sum | None:
    entering = block.entering.rows.double()
    for attention, mlp in pairs:
        summands = [term.value.double() for term in (attention, mlp) if term is not None]
        total = entering + torch.stack(summands).sum(0)
        if leaves_little(total, block.leaving.rows, summands, block.dtype):
            return Sum(attention, mlp, entering + summands[0])
    return None


def _fitted_sum(block: Block, pairs: Sequence[tuple[Term, Term | None]], known: Sequence[float]) -> Sum | None:
    """The summands, each times a number that is fitted, and then taken from `known` where that has it."""
    entering = block.entering.rows.double()
    added = (block.leaving.rows.double() - entering).flatten()
    for attention, mlp in pairs:
        values = [term.value.double() for term in (attention, mlp) if term is not None]
        fitted = least_squares(torch.stack([value.flatten() for value in values], dim=1), added)
        factors = [_nearest(float(factor), known) for factor in fitted]
        summands = [factor * value for factor, value in zip(factors, values, strict=True)]
        total = entering + torch.stack(summands).sum(0)
        if min(map(abs, factors)) > 1e-6 and leaves_little(total, block.leaving.rows, summands, block.dtype):
            second = None if mlp is None else _scaled(mlp, factors[1])
            return Sum(_scaled(attention, factors[0]), second, entering + summands[0])
    return None


def _nearest(factor: float, known: Sequence[float]) -> float:
    nearest = min((1.0, *known), key=lambda value: abs(value - factor))
    return nearest if abs(nearest - factor) <= 1e-3 * abs(factor) else factor


def _scaled(term: Term, factor: float) -> Term:
    return term if factor == 1.0 else Term(replace(term.formula, factor=factor), term.value, term.call)
