"""The axes of every array, and the array types whose shapes are written with them.

| axis | runs over |
|---|---|
| `batch` | requests beside each other; 1 inside a block |
| `token` | the rows of this step: the whole prompt on step 0, one row after |
| `key` | the positions attended to: every token of the request so far |
| `layer` | decoder blocks |
| `head`, `kv_head` | query heads, key/value heads |
| `d_head`, `d_value` | the width of a query or key, of a value |
| `d_model` | the residual stream |
| `d_mlp` | neurons of one feed-forward block |
| `expert` | experts of a router |
| `vocab` | the vocabulary |

A tensor that an engine keeps flattened over requests has the axis `row`, never `token`.
"""

from jaxtyping import Float, Int
from torch import Tensor

Stream = Float[Tensor, "batch token d_model"]
Neurons = Float[Tensor, "batch token d_mlp"]
Queries = Float[Tensor, "batch head token d_head"]
Keys = Float[Tensor, "batch kv_head token d_head"]
Pattern = Float[Tensor, "batch head token key"]
HeadOutputs = Float[Tensor, "batch token head d_value"]
Logits = Float[Tensor, "batch 1 vocab"]
TokenIds = Int[Tensor, "batch token"]
