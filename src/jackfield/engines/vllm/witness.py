"""Does the pattern that will be served give what the heads write?

Scores and pattern are computed beside the kernel, from what it was given. A kernel may do more than its arguments tell
(a sparse choice of keys, another bias). A layer whose pattern times values is not its head outputs in the probe does
not serve scores and pattern, and says why.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jackfield.engines.vllm.attention import OpFacts, PagedAttention
from jackfield.interleave.channel import WHOLE
from jackfield.interleave.step import Rows

EXACT, ROUNDED = 1e-3, 5e-2  # of a row's largest entry, in float32 and in narrower dtypes


def disagreement(facts: OpFacts, seen: Sequence[Tensor], dtype: torch.dtype) -> str | None:
    """Why scores and pattern cannot be served, by a whole prompt's queries, keys, values and head outputs.

    Each is [token, heads * width], float32.
    """
    q, k, v, written = (each.view(-1, *shape) for each, shape in zip(seen, _shapes(facts), strict=True))
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    rows = Rows(0, 0, q.shape[0])
    attention = PagedAttention(facts, rows, 0, (q, k, v), lambda: (keys, values), None, lambda site: None)
    pattern = attention.pattern(rows, WHOLE)[0]
    mixed = (pattern @ values.repeat_interleave(facts.num_heads // facts.num_kv_heads, 0)).transpose(0, 1)
    largest = written.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12)
    error = float(((mixed - written).abs() / largest).max())
    if error <= (EXACT if dtype == torch.float32 else ROUNDED):
        return None
    return (
        "what this attention computes is more than its arguments tell: the pattern times the values differs from its "
        f"head outputs by {error:.1e} of the largest"
    )


def _shapes(facts: OpFacts) -> list[tuple[int, int]]:
    keys, values = (facts.num_kv_heads, facts.d_head), (facts.num_kv_heads, facts.d_value)
    return [(facts.num_heads, facts.d_head), keys, values, (facts.num_heads, facts.d_value)]
