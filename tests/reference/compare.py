"""How far a value is from the reference, row by row, as the contract's section on numbers says.

A maximum over a whole tensor passes rows that are zero or belong to another token, when one row of the stream is
hundreds of times larger than the rest. So each token's row, and each query's row of scores and pattern, is held to its
own largest value.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from tests.reference.record import Step

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Per row, relative to the row's largest value."""

TOKEN_AXIS: dict[str, int] = {
    "token_embeddings": 1,
    "final_norm_output": 1,
    "logits": 1,
    "next_token_probabilities": 0,
    "layer_input": 1,
    "attention_norm_output": 1,
    "attention_output": 1,
    "layer_mid": 1,
    "mlp_norm_output": 1,
    "router_logits": 1,
    "mlp_activations": 1,
    "mlp_output": 1,
    "layer_output": 1,
    "attention_queries_prerotary": 2,
    "attention_keys_prerotary": 2,
    "attention_queries": 2,
    "attention_keys": 2,
    "attention_values": 2,
    "attention_cached_keys": 2,
    "attention_cached_values": 2,
    "attention_head_outputs": 1,
    "attention_premix": 1,
    "attention_head_results": 1,
}
"""The axis that counts tokens (cached keys and values: positions). A row is everything at one index of it."""

BY_QUERY: frozenset[str] = frozenset({"attention_scores", "attention_probabilities"})
"""Values whose rows are those of one head and one query, over all keys."""


def plain(name: str) -> str:
    """A value's name without the number of the call, in layers that attend twice."""
    return name.partition("/")[0]


def rows(x: Tensor, name: str) -> Tensor:
    """`x` as [row, entry] for the value `name`."""
    if plain(name) in BY_QUERY:
        return x.flatten(end_dim=-2)
    return x.movedim(TOKEN_AXIS[plain(name)], 0).flatten(start_dim=1)


def row_errors(got: Tensor, want: Tensor, name: str, *, alibi: bool = False) -> Tensor:
    """For each row of `name`, max |got - want| / max |want| over finite entries, [row] float32.

    A row whose shape, -inf or NaN do not coincide is infinitely far; one that is zero in both is not far at all. With
    `alibi` each query's constant is taken off both, since the origin of the bias is a convention.
    """
    if got.shape != want.shape:
        return torch.full((1,), inf)
    got, want = rows(got.detach().cpu().float(), name), rows(want.detach().cpu().float(), name)
    finite = want.isfinite()
    same_holes = _holes(got).eq(_holes(want)).all(-1)
    got, want = got.masked_fill(~finite, 0.0), want.masked_fill(~finite, 0.0)
    if alibi:
        got, want = _centred(got, finite), _centred(want, finite)
    difference, size = (got - want).abs().amax(-1), want.abs().amax(-1)
    error = torch.where(difference == 0, 0.0, difference / size)
    return error.nan_to_num(nan=inf, posinf=inf).masked_fill(~same_holes, inf)


def row_error(got: Tensor, want: Tensor, name: str, *, alibi: bool = False) -> float:
    """The worst of `row_errors`; 0 for a value without rows."""
    errors = row_errors(got, want, name, alibi=alibi)
    return float(errors.max()) if errors.numel() else 0.0


def assert_close(
    got: Tensor, want: Tensor, name: str, *, tolerance: float = 1e-4, alibi: bool = False, where: str = ""
) -> None:
    """Raise AssertionError where some row of `got` is further than `tolerance` from the reference `want`."""
    assert got.shape == want.shape, f"{where}{name}: shape {tuple(got.shape)}, the reference has {tuple(want.shape)}"
    errors = row_errors(got, want, name, alibi=alibi)
    if not errors.numel() or float(errors.max()) <= tolerance:
        return
    worst = int(errors.argmax())
    far = int((errors > tolerance).sum())
    holes = "; its -inf or NaN are not where the reference has them" if errors[worst] == inf else ""
    raise AssertionError(
        f"{where}{name}: row {worst} of {len(errors)} is {errors[worst]:.2e} from the reference, "
        f"{far} rows are further than {tolerance:g}{holes}"
    )


def assert_records_close(
    got: Sequence[Step], want: Sequence[Step], names: Sequence[str], *, tolerance: float = 1e-4, alibi: bool = False
) -> None:
    """`assert_close` for each of `names`, at every step and in every layer where the reference has it."""
    assert len(got) == len(want), f"{len(got)} steps, the reference has {len(want)}"
    for mine, theirs in zip(got, want, strict=True):
        for name in names:
            for layer in (None, *range(len(theirs.layers))):
                expected = theirs.get(name, layer)
                if expected is None:
                    continue
                where = f"step {theirs.index}, layer {layer}, " if layer is not None else f"step {theirs.index}, "
                value = mine.get(name, layer)
                assert value is not None, f"{where}{name}: missing"
                assert_close(value, expected, name, tolerance=tolerance, alibi=alibi, where=where)


def _holes(x: Tensor) -> Tensor:
    """0 where finite, else which kind of not finite."""
    return x.isnan() * 1 + x.isneginf() * 2 + x.isposinf() * 3


def _centred(x: Tensor, finite: Tensor) -> Tensor:
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    return (x - x.sum(-1, keepdim=True) / count).masked_fill(~finite, 0.0)
