"""The eight kinds of intervention, as frozen dataclasses: what is done, to which value, at which positions and heads.

Each is data: it has a JSON form, travels to any engine, and means the same on all of them. What it does to a row is
written once, in `rows`. Every field is read when the intervention is made; InvalidIntervention says what is wrong.

`site` is a value with its layers (`"layers.18.layer_output"`, `"layers.4-8.mlp_output"` with both ends,
`"layers.*.attention_head_outputs"`) or a value of the model (`"logits"`). `positions` are absolute positions, ranges,
`"last"` (the prompt's last token), `"prompt"`, or `"generated"`, which starts at the prompt's last token, the one that
makes the first new token. `heads` are numbered as in the model.

A tensor may be given as what `model.share(tensor, name=...)` returned, or by that name.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from jackfield.errors import InvalidIntervention
from jackfield.interventions.fields import READERS, GivenHeads, GivenTensor
from jackfield.interventions.json_form import decoded, encoded, one_of, parsed, written
from jackfield.interventions.places import GivenLayers, Layers, Place, numbered, parse_site
from jackfield.interventions.positions import GivenPositions
from jackfield.trace.result import Brief


class Intervention(ABC):
    """One edit or capture, as data. Two are equal where all of their fields are, tensors entry by entry."""

    __slots__ = ()
    edits: ClassVar[bool]
    """Whether it changes what the model computes."""

    def __post_init__(self) -> None:
        for name in _names(type(self)):
            try:
                read = READERS[name](getattr(self, name))
            except ValueError as error:
                raise InvalidIntervention(f"{type(self).__name__}, {name}: {error}") from None
            object.__setattr__(self, name, read)

    def holding(self, **tensors: Tensor | None) -> Self:
        """The same with these tensors, which are not read again."""
        return cast("Self", _again(type(self), [tensors.get(name, value) for name, value in self._items()]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), [value for _, value in self._items()])

    def to_json(self) -> str:
        """This intervention as JSON text: tensors as base64 of safetensors, or the name that they are shared under."""
        return written(encoded(self))

    @classmethod
    def from_json(cls, text: Any) -> Any:
        """The intervention that `to_json` wrote, of text or of JSON that was parsed already.

        InvalidIntervention for JSON of another format, another kind than this class, and keys that it does not have.
        """
        made = decoded(one_of(parsed(text)), kinds())
        if not isinstance(made, cls):
            raise InvalidIntervention(f"This is a {type(made).__name__}, and a {cls.__name__} was asked for.")
        return made

    def __repr__(self) -> str:
        brief = Brief()
        shown = (f"{name}={brief.repr(value)}" for name, value in self._items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervention) or type(self) is not type(other):
            return NotImplemented
        return all(_equal(one, another) for (_, one), (_, another) in zip(self._items(), other._items(), strict=True))

    def __hash__(self) -> int:
        return hash((type(self), *(value for _, value in self._items() if not isinstance(value, Tensor))))

    def _items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in _names(type(self))]


@cache
def _names(kind: type[Intervention]) -> tuple[str, ...]:
    """The fields of a kind, in their order."""
    return tuple(each.name for each in fields(kind))  # pyright: ignore[reportArgumentType]  # all are dataclasses


def _again(kind: type[Intervention], values: Sequence[Any]) -> Intervention:
    """One whose fields have been read before."""
    made = object.__new__(kind)
    for name, value in zip(_names(kind), values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Steer(Intervention):
    """Adds `scale * vector` [width] to each row; `relative`: `scale * |row| * vector`.

    >>> Steer("layers.18.layer_output", torch.ones(2), scale=4.0, positions="generated")
    Steer(site='layers.18.layer_output', vector=<Tensor (2,) float32>, scale=4.0, relative=False, positions='generated', heads=None)
    """  # noqa: E501 - what Python prints

    site: str
    vector: GivenTensor
    scale: float = 1.0
    relative: bool = False
    positions: GivenPositions = field(default="all", kw_only=True)
    heads: GivenHeads = field(default=None, kw_only=True)
    edits: ClassVar[bool] = True


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Project(Intervention):
    """Takes `strength` times each row's part in the span of `directions` [n, width], or [width], out of it.

    Directions need be neither of one length nor orthogonal, nor independent of each other.
    """

    site: str
    directions: GivenTensor
    strength: float = 1.0
    positions: GivenPositions = field(default="all", kw_only=True)
    heads: GivenHeads = field(default=None, kw_only=True)
    edits: ClassVar[bool] = True


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Scale(Intervention):
    """Multiplies each row by `factor`; 0 ablates. Masked scores stay masked."""

    site: str
    factor: float
    positions: GivenPositions = field(default="all", kw_only=True)
    heads: GivenHeads = field(default=None, kw_only=True)
    edits: ClassVar[bool] = True


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Replace(Intervention):
    """Puts `value` [width] in the place of each row."""

    site: str
    value: GivenTensor
    positions: GivenPositions = field(default="all", kw_only=True)
    heads: GivenHeads = field(default=None, kw_only=True)
    edits: ClassVar[bool] = True


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Skip(Intervention):
    """Hands the block's input on as its output, for each of `layers`: 18, [4, 8], range(4, 9), "4-8" or "*"."""

    layers: GivenLayers
    positions: GivenPositions = field(default="all", kw_only=True)
    edits: ClassVar[bool] = True


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Knockout(Intervention):
    """Masks the edges from `queries` to `keys`, both positions: what these tokens see of those, in these heads.

    A token that is left with nothing to see gets zeros from the attention.
    """

    layers: GivenLayers
    queries: GivenPositions = "all"
    keys: GivenPositions = "all"
    heads: GivenHeads = None
    edits: ClassVar[bool] = True


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Capture(Intervention):
    """Keeps rows in `Result.saved["layers.18.layer_output"]`: [tokens, ...], with heads [tokens, heads, ...].

    `reduce="last"` keeps the last of them, `"mean"` their mean in float32, both without the axis of tokens. Scores and
    patterns are as wide as the last row's keys; keys that came after a row hold -inf or 0 in it.
    """

    site: str
    reduce: str | None = None
    positions: GivenPositions = field(default="all", kw_only=True)
    heads: GivenHeads = field(default=None, kw_only=True)
    edits: ClassVar[bool] = False


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Probe(Intervention):
    """Keeps each row's product with n `directions` [n, width], plus `bias` [n], in `Result.saved[site]`.

    [tokens, n], with heads [tokens, heads, n]; float32. `reduce="last"` keeps those of the last row, `"mean"` the mean
    of the rows'. `top_k` keeps the k largest of what is left, largest first, and in `Result.saved[f"{site}.indices"]`,
    int64 of the same shape, which directions they are of.
    """

    site: str
    directions: GivenTensor
    bias: GivenTensor | float | None = None
    reduce: str | None = field(default=None, kw_only=True)
    top_k: int | None = field(default=None, kw_only=True)
    positions: GivenPositions = field(default="all", kw_only=True)
    heads: GivenHeads = field(default=None, kw_only=True)
    edits: ClassVar[bool] = False


def kinds() -> Mapping[str, type[Intervention]]:
    """The eight kinds by their names, which are those in JSON."""
    return {kind.__name__: kind for kind in (Steer, Project, Scale, Replace, Skip, Knockout, Capture, Probe)}


def title(intervention: Intervention) -> str:
    """`Steer at layers.18.layer_output`, for messages."""
    kind = type(intervention).__name__
    match intervention:
        case Skip(layers=layers) | Knockout(layers=layers):
            return f"{kind} of layers {layers}"
        case _:
            return f"{kind} at {cast('Any', intervention).site}"


def places(intervention: Intervention, num_layers: int) -> list[Place]:
    """Where it applies in a model of so many layers. ValueError for a layer that the model has not."""
    match intervention:
        case Skip(layers=layers):
            return [Place("layer_output", layer) for layer in numbered(cast("Layers", layers), num_layers)]
        case Knockout(layers=layers):
            return [Place("attention_scores", layer) for layer in numbered(cast("Layers", layers), num_layers)]
        case Steer(site=site) | Project(site=site) | Scale(site=site) | Replace(site=site):
            return parse_site(site).places(num_layers)
        case Capture(site=site) | Probe(site=site):
            return parse_site(site).places(num_layers)
        case _:
            raise TypeError(f"{type(intervention).__name__} applies nowhere.")
