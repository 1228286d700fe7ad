"""What is done to a row, in every dtype: computed in float32 and rounded once, and the input left as it is."""

import math

import pytest
import torch

from jackfield.interventions import rows
from tests.interventions.by_hand import numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    x, vector = (100 * numbers(5, 3, 8)).to(dtype), numbers(8, seed=1)
    kept = x.clone()
    exact = x.double()
    directions = numbers(2, 8, seed=2)
    basis = torch.linalg.qr(directions.double().T).Q.T
    expected = {
        "steer": (rows.steer(x, vector, 0.3, False), exact + 0.3 * vector),
        "relative": (rows.steer(x, vector, 0.3, True), exact + 0.3 * exact.norm(dim=-1, keepdim=True) * vector),
        "scale": (rows.scale(x, -0.3), -0.3 * exact),
        "replace": (rows.replace(x, vector), vector.double().expand_as(x)),
        "project": (rows.project(x, rows.orthonormal(directions), 0.7), exact - 0.7 * (exact @ basis.T) @ basis),
    }
    for name, (found, wanted) in expected.items():
        assert found.dtype == dtype
        half_a_step = torch.finfo(dtype).eps / 2 if dtype in (torch.bfloat16, torch.float16) else 0
        error = (found.double() - wanted).abs() - half_a_step * wanted.abs() * 1.01
        assert error.max() < 2e-4, name  # of float32's sums over rows of length 300
    assert x.equal(kept)


@pytest.mark.parametrize("factor", [0.0, -2.0, 3.0])
def test_masked_scores_stay_masked(factor: float) -> None:
    scores = torch.tensor([[1.0, -math.inf], [-math.inf, 2.0]])
    assert rows.scale(scores, factor).tolist() == [[factor, -math.inf], [-math.inf, 2 * factor]]


def test_a_basis_spans_what_was_given_whatever_the_lengths() -> None:
    one, other = numbers(2, 8)
    for given in ([one, other], [one, 1e-6 * other], [one, other, one + other, 0 * one], [1e4 * one, other, -one]):
        basis = rows.orthonormal(torch.stack(given))
        torch.testing.assert_close(basis @ basis.T, torch.eye(2))
        for direction in (one, other):
            torch.testing.assert_close(direction @ basis.T @ basis, direction, rtol=1e-4, atol=1e-5)


def test_directions_of_nothing_have_no_basis() -> None:
    assert rows.orthonormal(torch.zeros(3, 8)).shape == (0, 8)


def test_more_directions_than_a_row_is_wide_leave_nothing() -> None:
    x = numbers(4, 8)
    left = rows.project(x, rows.orthonormal(numbers(20, 8, seed=1)), 1.0)
    torch.testing.assert_close(left, torch.zeros_like(x), atol=1e-5, rtol=0)


def test_a_probe_of_half_precision_is_float32() -> None:
    x, directions = numbers(3, 8).bfloat16(), numbers(2, 8, seed=1)
    assert rows.probe(x, directions, None).dtype == torch.float32
    torch.testing.assert_close(rows.probe(x, directions, numbers(2)), x.float() @ directions.T + numbers(2))
