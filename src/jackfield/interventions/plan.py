"""Interventions held against a model before anything runs, and made ready: shared names looked up, bases computed.

What depends on the model is refused here; what depends on the prompt's length, in `Plan.block`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from jackfield.errors import InvalidIntervention
from jackfield.interleave.reference import Shared
from jackfield.interventions import rows
from jackfield.interventions.block import InterventionBlock
from jackfield.interventions.fields import check_tensor
from jackfield.interventions.kept import indices_of
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
    title,
)
from jackfield.interventions.places import Place
from jackfield.interventions.positions import Positions, check_reached, select
from jackfield.interventions.shared import tensor_of
from jackfield.values.anatomy import AttentionAnatomy
from jackfield.values.value import num_heads

Support: TypeAlias = dict[int | None, Mapping[str, str | None]]
"""Why values are not to be had, by the layer."""


@dataclass(slots=True)
class Known:
    """What has been found of a model while interventions were held against it."""

    support: Support = field(default_factory=Support)
    fitted: set[Any] = field(default_factory=set[Any])  # edits, without their numbers, that fit everywhere they apply


class Sizes(Protocol):
    """What is asked of a model's facts."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Target(Protocol):
    """What is asked of an engine."""

    @property
    def facts(self) -> Sizes: ...
    def support(self, layer: int | None) -> Mapping[str, str | None]: ...
    def attention(self, layer: int) -> AttentionAnatomy: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Interventions that fit a model. Tensors are in float32 (float64 for a float64 model); bases are orthonormal.

    `shapes` are those of one row of what is kept, by its name in `Result.saved`.
    """

    interventions: tuple[Intervention, ...]
    num_layers: int
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        interventions: Sequence[Intervention],
        target: Target,
        named: Mapping[str, Any],
        known: Known | None = None,
    ) -> "Plan":
        """The plan of interventions on a model where `named` are shared. InvalidIntervention says what does not fit.

        What is found of the target is found once for all plans that share `known`.
        """
        check = _Check(target, named, Known() if known is None else known)
        ready = tuple(check.ready(each) for each in interventions)
        return cls(ready, target.facts.num_layers, check.shapes)

    def block(self, prompt_length: int, max_tokens: int) -> InterventionBlock:
        """What runs beside a request of this length. InvalidIntervention for positions that it never comes to."""
        for each in self.interventions:
            try:
                _check_positions(each, self.num_layers, prompt_length, prompt_length + max_tokens - 1)
            except ValueError as error:
                raise InvalidIntervention(f"{title(each)}: {error}") from None
        return InterventionBlock(self.interventions, self.num_layers, self.shapes, prompt_length, max_tokens)


def _check_positions(each: Intervention, num_layers: int, prompt_length: int, end: int) -> None:
    for name in ("positions", "queries", "keys"):
        positions: Positions | None = getattr(each, name, None)  # of those that this kind has
        if positions is None:
            continue
        check_reached(positions, prompt_length, end)
        last = prompt_length - 1
        has_row = len(select(positions, prompt_length, end).rows(last, end))
        if not has_row and any(place.value.token_axis is None for place in places(each, num_layers)):
            raise ValueError(f"it has rows from the prompt's last token on, which is position {last}.")


class _Check:
    """One list of interventions against one model."""

    def __init__(self, target: Target, named: Mapping[str, Any], known: Known) -> None:
        self._target, self._named, self._known = target, named, known
        self._support = known.support
        self.shapes: dict[str, tuple[int, ...]] = {}

    def ready(self, given: Intervention) -> Intervention:
        """The intervention, with its tensors as they are used."""
        try:
            made = self._with_tensors(given)
            form = _form(made)
            if form is None or form not in self._known.fitted:
                for place in places(made, self._target.facts.num_layers):
                    self._fits(made, place)
                self._known.fitted.add(form)
        except ValueError as error:
            raise InvalidIntervention(f"{title(given)}: {error}") from None
        return made

    # -- tensors

    def _with_tensors(self, given: Intervention) -> Intervention:
        match given:
            case Steer(vector=vector):
                return given.holding(vector=self._tensor(vector, "vector", (1,)))
            case Replace(value=value):
                return given.holding(value=self._tensor(value, "value", (1,)))
            case Project(directions=directions):
                basis = rows.orthonormal(self._directions(directions))
                if not len(basis):
                    raise ValueError("all of its directions are zero, so that they span nothing.")
                return given.holding(directions=basis)
            case Probe(directions=directions, bias=bias, top_k=top_k):
                wide = self._directions(directions)
                if top_k is not None and top_k > len(wide):
                    raise ValueError(f"top_k={top_k} of {len(wide)} directions; take at most that many.")
                return given.holding(directions=wide, bias=self._bias(bias, len(wide)))
            case _:
                return given

    def _tensor(self, given: Tensor | Shared | str, name: str, axes: tuple[int, ...]) -> Tensor:
        double = self._target.facts.dtype == torch.float64
        tensor = tensor_of(given, self._named).detach().to(torch.float64 if double else torch.float32)
        check_tensor(tensor, f"{name} with {' or '.join(map(str, axes))} axes", axes)
        return tensor

    def _directions(self, given: Tensor | Shared | str) -> Tensor:
        directions = self._tensor(given, "directions", (1, 2))
        return directions[None] if directions.ndim == 1 else directions

    def _bias(self, given: Tensor | Shared | str | float | None, count: int) -> Tensor | None:
        if given is None:
            return None
        if isinstance(given, float | int):
            return torch.full((count,), float(given))
        bias = self._tensor(given, "bias", (1,))
        if len(bias) != count:
            raise ValueError(f"bias has {len(bias)} entries, and there are {count} directions.")
        return bias

    # -- places

    def _fits(self, made: Intervention, place: Place) -> None:
        self._available(place)
        if isinstance(made, Skip):
            self._available(Place("layer_input", place.layer))
        if made.edits:
            self._editable(place)
        if place.value.axes.split()[-2:-1] == ["k"]:
            raise ValueError(f"{place} has no row per token of a step; take {place.name.replace('cached_', '')}.")
        heads = self._heads(made, place)
        width = self._width(place)
        for name, columns in _columns(made):
            if place.value.axes.split()[-1] in ("t", "k"):
                raise ValueError(f"{name} needs rows of one width, and {place} has [{place.value.axes}].")
            if width is not None and columns != width:
                raise ValueError(f"{name} has {columns} entries, and a row of {place} is {width} wide.")
        if isinstance(made, Capture):
            self._keep(str(place), (*heads, width or 0) if place.name != "input_ids" else ())
        elif isinstance(made, Probe):
            self._keep(str(place), (*heads, made.top_k or len(cast("Tensor", made.directions))))
            if made.top_k is not None:
                self._keep(indices_of(place), (*heads, made.top_k))

    def _available(self, place: Place) -> None:
        if place.layer not in self._support:
            self._support[place.layer] = self._target.support(place.layer)
        reason = self._support[place.layer].get(place.name)
        if reason is not None:
            raise ValueError(f"{place} is not available: {reason}.")

    def _editable(self, place: Place) -> None:
        if place.value.access == "r":
            raise ValueError(f"{place} can be read only.")
        held = {"attention_keys": "k", "attention_values": "v"}.get(place.name)
        if held is not None and place.layer is not None:
            reason = self._target.attention(place.layer).unheld.get(held)
            if reason is not None:
                raise ValueError(f"{place} can be read, not edited: {reason}.")

    def _heads(self, made: Intervention, place: Place) -> tuple[int, ...]:
        """The axis of heads of what is read there, if there is one."""
        picked: tuple[int, ...] | None = getattr(made, "heads", None)  # a Skip has none
        if place.value.head_axis is None or place.layer is None:
            if picked is not None:
                raise ValueError(f"{place} has no heads: its axes are [{place.value.axes}].")
            return ()
        count = num_heads(place.value, self._target.attention(place.layer))
        for head in picked or ():
            if head >= count:
                raise ValueError(f"there is no head {head} at {place}: heads are 0 to {count - 1}.")
        return (count if picked is None else len(picked),)

    def _width(self, place: Place) -> int | None:
        """How wide a row is; None where it grows, and where only the model that runs tells."""
        facts, letter = self._target.facts, place.value.axes.split()[-1]
        if letter in ("d", "dv") and place.layer is not None:
            attention = self._target.attention(place.layer)
            return attention.d_head if letter == "d" else attention.d_value
        widths = {"h": facts.hidden_size, "vocab": facts.vocab_size, "intermediate": facts.intermediate_size}
        return widths.get(letter) or None

    def _keep(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self.shapes:
            raise ValueError(f"two interventions keep Result.saved[{name!r}]; keep one of them, or ask in two calls.")
        self.shapes[name] = shape


def _form(made: Intervention) -> Any:
    """All on which it depends whether an edit fits; None for what keeps rows, whose names are told apart."""
    if not isinstance(made, Steer | Project | Scale | Replace):
        return None
    return type(made), made.site, made.heads, tuple(_columns(made))


def _columns(made: Intervention) -> Iterator[tuple[str, int]]:
    """How wide the tensors are that are held against a row."""
    for name in ("vector", "value", "directions"):
        tensor: Tensor | None = getattr(made, name, None)  # of those that this kind has
        if tensor is not None:
            yield name, tensor.shape[-1]
