"""Where the values of the contract are in one loaded model: data that an engine reads off, and the values read from.

A value of the stream, a sublayer or a norm is `factor * (tensor at site - tensor at minus)`. That covers blocks that
add the residual inside a sublayer (`minus` is the argument that carried it in) and those that scale what they add.
A value that a model does not have, or that cannot be right, is `Missing`, with the reason a user will read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jackfield.interleave.site import Site


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that is not there, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Formula:
    """`factor * (site - minus)`, as [batch, token, width].

    `minus` is an argument of the same call whose output `site` is. `flat` says that the site holds
    [batch * token, width]: routers, and blocks that flatten their tokens. `stream` is which one it is of several
    parallel streams [stream, batch, token, width]. A site on an INPUT holds the very tensor that the block goes on to
    add to: an edit must be made in place, for a replaced argument would reach the module that takes it and no other.
    """

    site: Site
    minus: Site | None = None
    factor: float = 1.0
    flat: bool = False
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """Heads inside a projection's result, before the rotary embedding.

    The result, [batch, token, width] or, with its heads on `heads_axis` 1 or 2, four axes whose heads are then laid
    beside each other, is clamped to `clip` on both sides where that is given, and cut into `groups` equal parts on the
    last axis, each part into heads of `width`; of each part, heads `first` up to `first + count` are taken, then the
    parts are joined: [batch, token, groups * count, width]. `columns` are what is taken of each head, from and up to,
    where that is not all. Each head then stands `repeat` times, one beside the other.

    The result is multiplied by `factor`: on layers without a rotary embedding that makes it what the attention
    receives (OPT scales its queries ahead of the op). What rotary embeddings multiply lengths with (YaRN) is not in it.
    """

    site: Site
    width: int
    first: int = 0
    count: int = 1
    groups: int = 1
    heads_axis: int | None = None
    factor: float = 1.0
    repeat: int = 1
    clip: float | None = None
    columns: tuple[int, int] | None = None


Heads = Projection | tuple[Projection, ...] | Missing
"""Heads before the rotary embedding; of several projections they are joined on their width (latent attention)."""


@dataclass(frozen=True, slots=True)
class AttentionAnatomy:
    """The attention of one layer.

    `path` is the module whose forward computes it. `dispatched` says that it calls the attention interface of
    transformers; otherwise its own operations are listened to. `calls` is how many times it attends in one forward.
    Heads and widths are those of the tensors that the op receives. `window` is how many keys a query sees, itself
    included. `cache_layer` is the layer of the cache that holds its keys, which may be another layer's; None where the
    cache holds something else. `missing` gives, by the name of the value, why one cannot be served on this layer.
    `unheld` says of "k" and "v" why the cache does not hold them as the op receives them: they can be read, not edited.
    """

    path: str
    dispatched: bool
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_value: int
    scale: float | None
    window: int | None = None
    softcap: float | None = None
    calls: int = 1
    output_projection: str | None = None
    cache_layer: int | None = None
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    unheld: Mapping[str, str] = field(default_factory=dict[str, str])
    queries_prerotary: Heads = Missing("not looked for")
    keys_prerotary: Heads = Missing("not looked for")


@dataclass(frozen=True, slots=True)
class LayerAnatomy:
    """One decoder block: its module, its sublayers, and a Formula or a reason for each of its values."""

    path: str
    values: Mapping[str, Formula | Missing]
    attention: AttentionAnatomy | Missing
    attention_path: str | None = None
    mlp_path: str | None = None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A whole decoder. `values` are the root's; `broken` says, per identity that does not hold on this family, why."""

    layers: tuple[LayerAnatomy, ...]
    values: Mapping[str, Formula | Missing]
    final_norm: str | None
    output_head: str | None
    broken: Mapping[str, str] = field(default_factory=dict[str, str])
