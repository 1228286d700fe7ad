"""Interventions as the block that they are: per step, the values that they apply to, in the order of the forward pass.

A step in which no position is meant is not waited for, and of a value no other rows and heads are read than those that
are meant. What is done to them is in `rows`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from jackfield.errors import InvalidIntervention
from jackfield.interleave.step import Rows
from jackfield.interventions import rows
from jackfield.interventions.kept import AllRows, Kept, Largest, LargestOfMean, LastRow, MeanRow
from jackfield.interventions.kinds import (
    Capture,
    Intervention,
    Knockout,
    Probe,
    Project,
    Replace,
    Scale,
    Skip,
    Steer,
    places,
)
from jackfield.interventions.places import Place
from jackfield.interventions.positions import Selected, select
from jackfield.trace.tracer import Tracer
from jackfield.values.value import Value

Picked = tuple[int, ...] | None
"""Rows of a step, or all of them."""
Act = Callable[[Picked], None]


class Wanted(Protocol):
    """Which rows of a step are meant."""

    def within(self, positions: range) -> Sequence[int]: ...


class Data(Protocol):
    """The block, as it is run."""

    @property
    def interventions(self) -> tuple[Intervention, ...]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AtLast:
    """For a value with one row a step, that of its last position."""

    selected: Selected

    def within(self, positions: range) -> Sequence[int]:
        """That row, where it is meant."""
        return [len(positions) - 1] if positions[-1] in self.selected else []


@dataclass(frozen=True, slots=True)
class Edges:
    """From queries to keys: the rows of those queries that can see one of the keys."""

    queries: Selected
    keys: Selected

    def within(self, positions: range) -> Sequence[int]:
        """Queries before the first of the keys see none."""
        return [row for row in self.queries.within(positions) if positions[row] >= self.keys.first]


@dataclass(frozen=True, slots=True)
class Visit:
    """One intervention at one place. `order` sorts by the forward pass, then by the list."""

    order: tuple[tuple[int, int], int, int]
    wanted: Wanted
    act: Act


class ValueAt:
    """One value, or some of its heads, in the running block."""

    def __init__(self, model: Any, place: Place, heads: tuple[int, ...] | None) -> None:
        self._part = model if place.layer is None else model.layers[place.layer]
        self.place, self._value, self._heads = place, place.value, heads

    def read(self, picked: Picked) -> Tensor:
        """A private copy of the picked rows, in the value's own shape."""
        if self._value.each_step:  # it is there whole, whatever is picked
            whole: Tensor = self._part.read(self._value.name)
            return whole if picked is None else whole[:, list(picked)]
        return self._part.read(self._value.name, heads=self._heads, queries=self._queries(picked))

    def write(self, new: Tensor, picked: Picked) -> None:
        """Puts rows, of the shape that `read` gives, in their place."""
        self._part.write(self._value.name, new, heads=self._heads, queries=self._queries(picked))

    def _queries(self, picked: Picked) -> Picked:
        return None if self._value.token_axis is None else picked


@dataclass(frozen=True, slots=True)
class Edit:
    """Changes rows of one value."""

    at: ValueAt
    change: Callable[[Tensor], Tensor]

    def __call__(self, picked: Picked) -> None:
        self.at.write(self.change(self.at.read(picked)), picked)


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps rows of one value, or what is computed of each."""

    at: ValueAt
    kept: Kept
    reading: Callable[[Tensor], Tensor]

    def __call__(self, picked: Picked) -> None:
        self.kept.add(self.reading(self._rows_first(self.at.read(picked))))

    def _rows_first(self, x: Tensor) -> Tensor:
        """[1, t, ...] or [1, head, t, ...] as [t, ...] or [t, head, ...]."""
        value = self.at.place.value
        if value.token_axis is None:
            return x.flatten(0, -2)  # a row of logits
        return x[0].movedim(value.token_axis - 1, 0)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A change or a reading with a tensor `width` wide. The widths that no fact gives are held against here."""

    apply: Callable[[Tensor], Tensor]
    name: str
    width: int

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.width:
            raise InvalidIntervention(f"{self.name} has {self.width} entries, and a row is {x.shape[-1]} wide.")
        return self.apply(x)


class Masking:
    """Masks keys; those of one step are found once for all layers."""

    def __init__(self, keys: Selected, device: torch.device) -> None:
        self._keys, self._device = keys, device
        self._mask = torch.zeros(0, dtype=torch.bool, device=device)

    def __call__(self, scores: Tensor) -> Tensor:
        if len(self._mask) != scores.shape[-1]:
            self._mask = self._keys.mask(scores.shape[-1], self._device)
        return rows.knock_out(scores, self._mask)


class Passed:
    """A block's input, kept until it is handed on as the block's output."""

    def __init__(self, model: Any, place: Place) -> None:
        self._entering = ValueAt(model, Place("layer_input", place.layer), None)
        self._leaving = ValueAt(model, place, None)
        self._hidden: Tensor | None = None

    def enter(self, picked: Picked) -> None:
        """At the block's input."""
        self._hidden = self._entering.read(picked)

    def leave(self, picked: Picked) -> None:
        """At the block's output."""
        assert self._hidden is not None
        self._leaving.write(self._hidden, picked)
        self._hidden = None


class Running:
    """The block beside one request."""

    def __init__(self, block: Data, t: Tracer, device: torch.device, model: Any) -> None:
        self._t, self._device, self._model = t, device, model
        self._block = block
        self._end = block.prompt_length + block.max_tokens - 1
        self._kept: list[Kept] = []
        visits = [visit for number, each in enumerate(block.interventions) for visit in self._visits(number, each)]
        self._visits_in_order = sorted(visits, key=lambda visit: visit.order)
        self._wanted = list(dict.fromkeys(visit.wanted for visit in visits))

    def run(self) -> None:
        """Steps, and at the end what is kept."""
        for step in self._t.iter[self._steps()]:
            self._step(self._positions(step))
        if self._kept:
            self._t.save(**{name: found for kept in self._kept for name, found in kept.results().items()})

    def _steps(self) -> list[int]:
        """Those in which a position is meant."""
        every = range(self._block.max_tokens)
        return [step for step in every if any(wanted.within(self._positions(step)) for wanted in self._wanted)]

    def _positions(self, step: int) -> range:
        return Rows(0, 0, self._block.prompt_length).positions(step)

    def _step(self, positions: range) -> None:
        picked = {wanted: tuple(wanted.within(positions)) for wanted in self._wanted}
        for visit in self._visits_in_order:
            if chosen := picked[visit.wanted]:
                visit.act(None if len(chosen) == len(positions) else chosen)

    # -- what is done where

    def _visits(self, number: int, each: Intervention) -> list[Visit]:
        found: list[Visit] = []
        at = places(each, self._block.num_layers)
        wanted = self._wanted_of(each, at[0].value)
        if isinstance(each, Skip):
            for place in at:
                passed, entering = Passed(self._model, place), Place("layer_input", place.layer)
                found.append(Visit((entering.rank, 1, number), wanted, passed.enter))  # 1: after what is done to it
                found.append(Visit((place.rank, 0, number), wanted, passed.leave))
            return found
        change = self._change(each)
        heads: tuple[int, ...] | None = cast("Any", each).heads
        for place in at:
            value = ValueAt(self._model, place, heads)
            act = self._keeping(each, value, change) if isinstance(each, Capture | Probe) else Edit(value, change)
            found.append(Visit((place.rank, 0, number), wanted, act))
        return found

    def _wanted_of(self, each: Intervention, value: Value) -> Wanted:
        if isinstance(each, Knockout):
            return Edges(self._selected(each.queries), self._selected(each.keys))
        selected = self._selected(cast("Any", each).positions)
        return selected if value.token_axis is not None else AtLast(selected)

    def _selected(self, positions: Any) -> Selected:
        return select(positions, self._block.prompt_length, self._end)

    def _change(self, each: Intervention) -> Callable[[Tensor], Tensor]:
        """What is done to rows, or kept of them. Its tensors go to the device once, however many layers there are."""
        match each:
            case Steer(vector=vector, scale=scale, relative=relative):
                change = partial(rows.steer, vector=self._here(vector), scale=scale, relative=relative)
                return Fitted(change, "vector", cast("Tensor", vector).shape[-1])
            case Project(directions=basis, strength=strength):
                change = partial(rows.project, basis=self._here(basis), strength=strength)
                return Fitted(change, "directions", cast("Tensor", basis).shape[-1])
            case Replace(value=value):
                change = partial(rows.replace, value=self._here(value))
                return Fitted(change, "value", cast("Tensor", value).shape[-1])
            case Probe(directions=directions, bias=bias):
                bias = None if bias is None else self._here(bias)
                change = partial(rows.probe, directions=self._here(directions), bias=bias)
                return Fitted(change, "directions", cast("Tensor", directions).shape[-1])
            case Scale(factor=factor):
                return partial(rows.scale, factor=factor)
            case Knockout(keys=keys):
                return Masking(self._selected(keys), self._device)
            case _:
                return torch.clone  # of a Capture: what was read is a part of the worker's books

    def _keeping(self, each: Capture | Probe, at: ValueAt, reading: Callable[[Tensor], Tensor]) -> Keep:
        kept = self._keeper(each, at.place)
        self._kept.append(kept)
        return Keep(at, kept, reading)

    def _keeper(self, each: Capture | Probe, place: Place) -> Kept:
        if isinstance(each, Capture):
            kind = place.value.dtype
            return self._rows(each.reduce, place, self._model.dtype if kind == "model" else getattr(torch, kind))
        if each.top_k is None:
            return self._rows(each.reduce, place, torch.float32)
        if each.reduce == "mean":
            return LargestOfMean(place, each.top_k)
        values, indices = (self._rows(each.reduce, place, dtype) for dtype in (torch.float32, torch.int64))
        return Largest(place, each.top_k, values, indices)

    def _rows(self, reduce: str | None, place: Place, dtype: torch.dtype) -> Kept:
        if reduce is not None:
            return LastRow(place) if reduce == "last" else MeanRow(place)
        return AllRows(place, torch.empty(0, *self._block.shapes[str(place)], dtype=dtype))

    def _here(self, tensor: Any) -> Tensor:
        return cast("Tensor", tensor).to(self._device)
