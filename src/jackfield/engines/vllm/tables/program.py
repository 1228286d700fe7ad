"""From interventions to operations.

Where every one of them has such a form they make a `Program`; where one has not, none does, and all run as a block.
What programs have in common but for their numbers is found once, and is their `Form`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, cast

import torch
from torch import Tensor

from jackfield.engines.vllm.parts import WHOLE_PART
from jackfield.engines.vllm.passing import HeadsChannel, StreamChannel
from jackfield.engines.vllm.tables.ops import Act, Keeper, Kept, Kind, Numbers, Op, Part
from jackfield.engines.vllm.tables.strips import Strips
from jackfield.interleave.channel import Channel
from jackfield.interleave.site import Site
from jackfield.interventions.kinds import (
    Capture,
    Intervention,
    Probe,
    Project,
    Replace,
    Scale,
    Skip,
    Steer,
    places,
)
from jackfield.interventions.places import Place
from jackfield.interventions.positions import Positions

MOST_OPS: Final = 4096
"""Of one request: with more, every step of every row would be long."""
MOST_DIRECTIONS: Final = 64
"""Of one operation: a row has one program for all of them, where more are a matrix product of all rows."""
NUMBERS: Final = frozenset({"scale", "strength", "factor", "bias"})
"""The fields of interventions that an Act holds, beside the tensors."""


class Form:
    """Operations in the order of the pass, each with its positions, and what is kept."""

    def __init__(self, ops: Sequence[tuple[Positions, Op]], keepers: Sequence[Keeper]) -> None:
        self._ops, self.keepers, self.strips = ops, keepers, Strips(keepers)
        self.positions = tuple(dict.fromkeys(positions for positions, _ in ops))
        self._parts: dict[frozenset[Positions], Part] = {}

    def part(self, meant: frozenset[Positions]) -> Part:
        """The operations for rows at these of the positions."""
        if meant not in self._parts:
            by_site: dict[Site, list[Op]] = {}
            for positions, op in self._ops:
                if positions in meant:
                    by_site.setdefault(op.site, []).append(op)
            self._parts[meant] = Part(by_site)
        return self._parts[meant]


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A form and its numbers. Requests with the same interventions share one."""

    form: Form
    acts: tuple[Act, ...]


class Untold(Exception):
    """An intervention that has no form here: it runs as a block, and nobody is told."""


@dataclass(frozen=True, slots=True)
class Places:
    """What is known of where values pass: the channel that serves each, how wide its site is, and the model's dtype."""

    channels: Mapping[tuple[str, int | None], Channel]
    widths: Mapping[Site, int]
    dtype: torch.dtype
    forms: dict[tuple[Any, ...], Form | None] = field(default_factory=dict[tuple[Any, ...], "Form | None"])

    def channel(self, place: Place) -> StreamChannel:
        """The channel of a value that is rows of a tap, whole. Untold for any other."""
        channel = self.channels.get((place.name, place.layer))
        if type(channel) not in (StreamChannel, HeadsChannel):
            raise Untold
        found = cast("StreamChannel", channel)
        if found.factor != 1.0 or found.joint is not WHOLE_PART or found.site not in self.widths:
            raise Untold
        return found


def program(
    interventions: Sequence[Intervention], num_layers: int, shapes: Mapping[str, tuple[int, ...]], known: Places
) -> Program | None:
    """The program of interventions; None where one of them has none. `shapes` are those of a kept row."""
    key = tuple(_key(each) for each in interventions)
    if key not in known.forms:
        if len(known.forms) >= MOST_FORMS:
            known.forms.clear()
        known.forms[key] = _form(interventions, num_layers, shapes, known)
    form = known.forms[key]
    return None if form is None else Program(form, tuple(map(_act, interventions)))


MOST_FORMS: Final = 1024


def _key(each: Intervention) -> tuple[Any, ...]:
    """All of an intervention but its numbers."""
    named = [(name.name, getattr(each, name.name)) for name in fields(cast("Any", each)) if name.name not in NUMBERS]
    return type(each), *(tuple(value.shape) if isinstance(value, Tensor) else value for _, value in named)


def _form(
    interventions: Sequence[Intervention], num_layers: int, shapes: Mapping[str, tuple[int, ...]], known: Places
) -> Form | None:
    try:
        visits = [
            visit
            for number, each in enumerate(interventions)
            for visit in _visits(number, each, num_layers, shapes, known)
        ]
    except Untold:
        return None
    keepers = [visit.keeper for visit in visits if visit.keeper is not None]  # as the list has them
    visits.sort(key=lambda visit: visit.order)
    ops = [(visit.positions, op) for visit in visits for op in visit.ops]
    return Form(ops, keepers) if len(ops) <= MOST_OPS else None


def _act(each: Intervention) -> Act:
    match each:
        case Steer(vector=vector, scale=scale):
            return Act(float(scale), Numbers.of(cast("Tensor", vector)[None]))
        case Project(directions=basis, strength=strength):
            return Act(float(strength), Numbers.of(cast("Tensor", basis)))
        case Replace(value=value):
            return Act(0.0, Numbers.of(cast("Tensor", value)[None]))
        case Scale(factor=factor):
            return Act(float(factor))
        case Probe(directions=directions, bias=bias):
            return Act(0.0, Numbers.of(cast("Tensor", directions), cast("Tensor | None", bias)))
        case _:
            return Act()


@dataclass(frozen=True, slots=True)
class _Visit:
    order: tuple[tuple[int, int], int, int]
    positions: Positions
    ops: Sequence[Op]
    keeper: Keeper | None = None


def _visits(
    number: int, each: Intervention, num_layers: int, shapes: Mapping[str, tuple[int, ...]], known: Places
) -> Iterator[_Visit]:
    kind, vectors = _kind(each), _vectors(each)
    positions = cast("Positions", cast("Any", each).positions)
    for place in places(each, num_layers):
        if place.value.token_axis is None:
            raise Untold
        channel = known.channel(place)
        if isinstance(each, Skip):
            entering = Place("layer_input", place.layer)
            stash = _whole(Kind.STASH, known.channel(entering), known, number)
            yield _Visit((entering.rank, 1, number), positions, [stash])
            yield _Visit((place.rank, 0, number), positions, [_whole(Kind.RESTORE, channel, known, number)])
            continue
        columns = _columns(cast("Any", each).heads, channel, known, vectors)
        count = 0 if vectors is None else len(vectors)
        ops = [Op(kind, channel.site, channel.summed, start, width, number, count) for start, width in columns]
        if isinstance(each, Capture | Probe):
            yield _keeping(number, each, place, ops, shapes[str(place)], known)
        else:
            yield _Visit((place.rank, 0, number), positions, ops)


def _kind(each: Intervention) -> Kind:
    """What is done. Untold for what has no operation."""
    if isinstance(each, Steer):
        return Kind.STEER_RELATIVE if each.relative else Kind.STEER
    if isinstance(each, Probe) and each.top_k is not None:
        raise Untold
    kinds: Mapping[type, Kind] = {
        Project: Kind.PROJECT,
        Scale: Kind.SCALE,
        Replace: Kind.REPLACE,
        Capture: Kind.CAPTURE,
        Probe: Kind.PROBE,
        Skip: Kind.RESTORE,
    }
    if type(each) not in kinds:
        raise Untold
    return kinds[type(each)]


def _vectors(each: Intervention) -> Tensor | None:
    """[n, width], if it has any. Untold for too many."""
    vectors = next(
        (value for name in ("vector", "value", "directions") if (value := getattr(each, name, None)) is not None), None
    )
    if vectors is None:
        return None
    found = cast("Tensor", vectors)
    if found.ndim == 1:
        return found[None]
    if len(found) > MOST_DIRECTIONS:
        raise Untold
    return found


def _whole(kind: Kind, channel: StreamChannel, known: Places, number: int) -> Op:
    return Op(kind, channel.site, channel.summed, 0, known.widths[channel.site], number)


def _columns(
    heads: tuple[int, ...] | None, channel: StreamChannel, known: Places, vectors: Tensor | None
) -> list[tuple[int, int]]:
    """Where rows begin in what passes at the site, and how wide each is: one, or one per head."""
    whole = known.widths[channel.site]
    if not isinstance(channel, HeadsChannel):
        found = [(0, whole)]
    else:
        width = whole // channel.num_heads
        picked = range(channel.num_heads) if heads is None else heads
        found = [(head * width, width) for head in picked]
    if vectors is not None and vectors.shape[-1] != found[0][1]:
        raise Untold  # the block says so, when it comes to it
    return found


def _keeping(
    number: int, each: Capture | Probe, place: Place, ops: Sequence[Op], shape: Sequence[int], known: Places
) -> _Visit:
    if isinstance(each, Capture) and place.value.dtype != "model":
        raise Untold
    width = ops[0].count if isinstance(each, Probe) else ops[0].width
    dtype = torch.float32 if isinstance(each, Probe) else known.dtype
    columns = tuple((op.start, op.width) for op in ops)
    kept = Kept(str(place), ops[0].site, width * len(ops), dtype, columns)
    keeping = [
        Op(op.kind, op.site, op.summed, op.start, op.width, number, op.count, kept, index * width)
        for index, op in enumerate(ops)
    ]
    positions = cast("Positions", each.positions)
    return _Visit(
        (place.rank, 0, number), positions, keeping, Keeper(kept, place, tuple(shape), each.reduce, positions)
    )
