"""What interventions come down to at each tap: operations on columns of a row, in order.

An `Op` is what the kernel and its double in torch carry out, one after another, for each row that it is meant for.
Interventions of which every one has such a form make a `Program`; of any other, none does.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, cast

import torch
from torch import Tensor

from jackfield.engines.vllm.parts import WHOLE_PART
from jackfield.engines.vllm.passing import HeadsChannel, StreamChannel
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Channel
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


class Kind(IntEnum):
    """What an operation does to its columns of the row."""

    STEER = 0
    STEER_RELATIVE = 1
    PROJECT = 2
    SCALE = 3
    REPLACE = 4
    CAPTURE = 5
    PROBE = 6
    STASH = 7
    RESTORE = 8


EDITS: Final = frozenset({Kind.STEER, Kind.STEER_RELATIVE, Kind.PROJECT, Kind.SCALE, Kind.REPLACE, Kind.RESTORE})


@dataclass(frozen=True, slots=True)
class Kept:
    """What a row leaves behind: `width` numbers of `dtype`, in columns that requests who keep the same share."""

    place: str
    site: Site
    width: int
    dtype: torch.dtype
    columns: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Numbers:
    """What an operation multiplies rows with: `vectors` [n, width] and `bias` [n], float32. Known by its contents."""

    vectors: Tensor
    bias: Tensor
    digest: bytes

    @classmethod
    def of(cls, vectors: Tensor, bias: Tensor | None = None) -> "Numbers":
        """Of vectors [n, width] and a bias [n], which is 0 where none is given; both on the CPU."""
        wide = vectors.float().cpu().contiguous()
        own = torch.zeros(len(wide)) if bias is None else bias.float().cpu().contiguous()
        digest = hashlib.blake2b(wide.numpy().tobytes(), digest_size=16)
        digest.update(own.numpy().tobytes())
        return cls(wide, own, digest.digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.vectors.shape == other.vectors.shape and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation at one site, on `width` columns from `start` on.

    `summed`: of the row that is the sum of both halves. `column` counts from the first column of `kept`.
    """

    kind: Kind
    site: Site
    summed: bool
    start: int
    width: int
    scale: float = 0.0
    numbers: Numbers | None = None
    kept: Kept | None = None
    column: int = 0


@dataclass(frozen=True, slots=True)
class Keeper:
    """One entry of `Result.saved`: rows of `shape` at these positions, or what `reduce` makes of them."""

    kept: Kept
    place: Place
    shape: tuple[int, ...]
    reduce: str | None
    positions: Positions


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """What interventions come down to, whatever the prompt: operations in the order of the pass, and their positions.

    Requests with the same interventions share one.
    """

    ops: tuple[tuple[Positions, Op], ...]
    keepers: tuple[Keeper, ...]
    positions: tuple[Positions, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(dict.fromkeys(positions for positions, _ in self.ops)))


class Untold(Exception):
    """An intervention that has no form here: it runs as a block, and nobody is told."""


@dataclass(frozen=True, slots=True)
class Places:
    """What is known of where values pass: the channel that serves each, how wide its site is, and the model's dtype."""

    channels: Mapping[tuple[str, int | None], Channel]
    widths: Mapping[Site, int]
    dtype: torch.dtype

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
    try:
        visits = [
            visit
            for number, each in enumerate(interventions)
            for visit in _visits(number, each, num_layers, shapes, known)
        ]
    except Untold:
        return None
    visits.sort(key=lambda visit: visit.order)
    ops = tuple((visit.positions, op) for visit in visits for op in visit.ops)
    keepers = tuple(visit.keeper for visit in visits if visit.keeper is not None)
    return Program(ops, keepers) if len(ops) <= MOST_OPS else None


@dataclass(frozen=True, slots=True)
class _Visit:
    order: tuple[tuple[int, int], int, int]
    positions: Positions
    ops: Sequence[Op]
    keeper: Keeper | None = None


def _visits(
    number: int, each: Intervention, num_layers: int, shapes: Mapping[str, tuple[int, ...]], known: Places
) -> Iterator[_Visit]:
    if not isinstance(each, Steer | Project | Scale | Replace | Skip | Capture | Probe):
        raise Untold
    if isinstance(each, Probe) and each.top_k is not None:
        raise Untold
    positions, act = cast("Positions", each.positions), _act(each)
    if act.numbers is not None and len(act.numbers.vectors) > MOST_DIRECTIONS:
        raise Untold
    for place in places(each, num_layers):
        if place.value.token_axis is None:
            raise Untold
        channel = known.channel(place)
        if isinstance(each, Skip):
            entering = Place("layer_input", place.layer)
            entrance = known.channel(entering)
            yield _Visit((entering.rank, 1, number), positions, [_whole(Kind.STASH, entrance, known)])
            yield _Visit((place.rank, 0, number), positions, [_whole(Kind.RESTORE, channel, known)])
            continue
        columns = _columns(cast("Any", each.heads), channel, known, act.numbers)
        if isinstance(each, Capture | Probe):
            yield _keeping(number, each, act, place, channel, columns, shapes[str(place)], known)
        else:
            ops = [
                replace(act, site=channel.site, summed=channel.summed, start=start, width=width)
                for start, width in columns
            ]
            yield _Visit((place.rank, 0, number), positions, ops)


def _act(each: Intervention) -> Op:
    """What is done, wherever it will be."""
    nowhere = Site("", Port.OUTPUT)
    match each:
        case Steer(vector=vector, scale=scale, relative=relative):
            kind = Kind.STEER_RELATIVE if relative else Kind.STEER
            return Op(kind, nowhere, False, 0, 0, float(scale), Numbers.of(cast("Tensor", vector)[None]))
        case Project(directions=basis, strength=strength):
            return Op(Kind.PROJECT, nowhere, False, 0, 0, float(strength), Numbers.of(cast("Tensor", basis)))
        case Replace(value=value):
            return Op(Kind.REPLACE, nowhere, False, 0, 0, 0.0, Numbers.of(cast("Tensor", value)[None]))
        case Scale(factor=factor):
            return Op(Kind.SCALE, nowhere, False, 0, 0, float(factor))
        case Probe(directions=directions, bias=bias):
            numbers = Numbers.of(cast("Tensor", directions), cast("Tensor | None", bias))
            return Op(Kind.PROBE, nowhere, False, 0, 0, 0.0, numbers)
        case _:
            return Op(Kind.CAPTURE, nowhere, False, 0, 0)


def _whole(kind: Kind, channel: StreamChannel, known: Places) -> Op:
    return Op(kind, channel.site, channel.summed, 0, known.widths[channel.site])


def _columns(
    heads: tuple[int, ...] | None, channel: StreamChannel, known: Places, numbers: Numbers | None
) -> list[tuple[int, int]]:
    """Where rows begin in what passes at the site, and how wide each is: one, or one per head."""
    whole = known.widths[channel.site]
    if not isinstance(channel, HeadsChannel):
        found = [(0, whole)]
    else:
        width = whole // channel.num_heads
        picked = range(channel.num_heads) if heads is None else heads
        found = [(head * width, width) for head in picked]
    if numbers is not None and numbers.vectors.shape[-1] != found[0][1]:
        raise Untold  # the block says so, when it comes to it
    return found


def _keeping(
    number: int,
    each: Capture | Probe,
    act: Op,
    place: Place,
    channel: StreamChannel,
    columns: Sequence[tuple[int, int]],
    shape: Sequence[int],
    known: Places,
) -> _Visit:
    is_probe = act.numbers is not None
    if not is_probe and place.value.dtype != "model":
        raise Untold
    width = len(act.numbers.vectors) if act.numbers is not None else columns[0][1]
    kept = Kept(
        str(place), channel.site, width * len(columns), torch.float32 if is_probe else known.dtype, tuple(columns)
    )
    ops = [
        replace(act, site=channel.site, summed=channel.summed, start=start, width=size, kept=kept, column=index * width)
        for index, (start, size) in enumerate(columns)
    ]
    positions = cast("Positions", each.positions)
    return _Visit((place.rank, 0, number), positions, ops, Keeper(kept, place, tuple(shape), each.reduce, positions))
