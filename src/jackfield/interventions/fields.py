"""What the fields of an intervention may hold: each is read once, when the intervention is made.

A reader gives the field as it is kept, or raises ValueError with the reason. What depends on a model (whether it has
that layer, how wide its stream is) is held against it in `plan`.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor

from jackfield.errors import near
from jackfield.interleave.reference import Shared
from jackfield.interventions.places import read_layers, read_site
from jackfield.interventions.positions import read_positions, whole

GivenTensor: TypeAlias = Tensor | Shared | str
"""A tensor, a handle of `model.share`, or the name that it was shared under."""
GivenHeads: TypeAlias = int | Iterable[int] | None
Reader: TypeAlias = Callable[[object], object]
REDUCTIONS: Final = ("last", "mean")


def read_number(given: object) -> float:
    """A finite number."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not math.isfinite(given):
        raise ValueError(f"{given!r} is no finite number.")
    return float(given)


def read_flag(given: object) -> bool:
    """True or False."""
    if not isinstance(given, bool):
        raise ValueError(f"{given!r} is neither True nor False.")
    return given


def read_heads(given: object) -> tuple[int, ...] | None:
    """Numbers of heads, or None for all."""
    if given is None:
        return None
    wanted = f"{given!r} says no heads; write 3, [3, 5] or range(4), each head once, counted from 0, or None for all."
    several = isinstance(given, Iterable) and not isinstance(given, str)
    heads = tuple(whole(each, wanted) for each in cast("Iterable[object]", given if several else [given]))
    if not heads or len(set(heads)) != len(heads) or min(heads) < 0:
        raise ValueError(wanted)
    return heads


def read_reduction(given: object) -> str | None:
    """None, "last" or "mean"."""
    if given is None or given in REDUCTIONS:
        return cast("str | None", given)
    raise ValueError(f"{given!r} is no way to reduce; write None, 'last' or 'mean'.{near(str(given), REDUCTIONS)}")


def read_top_k(given: object) -> int | None:
    """How many of the largest are kept, or None for all."""
    if given is None:
        return None
    count = whole(given, f"{given!r} is no number of products; write a whole number from 1, or None for all.")
    if count < 1:
        raise ValueError(f"{count} products are none; write a whole number from 1, or None for all.")
    return count


def read_vector(given: object) -> GivenTensor:
    """One vector [width]."""
    return _tensor(given, "a vector [width]", (1,))


def read_directions(given: object) -> GivenTensor:
    """Directions [n, width], or one of them [width]."""
    return _tensor(given, "directions [n, width], or one [width]", (1, 2))


def read_bias(given: object) -> GivenTensor | float | None:
    """One number per direction, a number for all, or None."""
    if given is None or isinstance(given, numbers.Real):
        return None if given is None else read_number(given)
    return _tensor(given, "one number per direction [n], or a number", (1,))


def _tensor(given: object, wanted: str, axes: tuple[int, ...]) -> GivenTensor:
    if isinstance(given, str) and given:
        return given
    held = given.value if isinstance(given, Shared) else given
    if not isinstance(held, Tensor):
        raise ValueError(
            f"it is a {type(held).__name__}; write {wanted}: a tensor, or what model.share(tensor, name=...) gave, or "
            "that name."
        )
    check_tensor(held, wanted, axes)
    return given if isinstance(given, Shared) else held.detach()


def check_tensor(given: Tensor, wanted: str, axes: tuple[int, ...]) -> None:
    """ValueError for a tensor of other axes, of no floating dtype, empty, or with a number that is not finite."""
    if given.ndim not in axes or not given.numel() or not given.is_floating_point():
        raise ValueError(
            f"it has shape {tuple(given.shape)} and dtype {given.dtype}; write {wanted} in floating point."
        )
    if given.layout != torch.strided or given.is_meta:
        raise ValueError(f"it is {given.layout} on {given.device}; write {wanted} that is dense, and has numbers.")
    if not given.isfinite().all():
        raise ValueError("it has entries that are not finite.")


READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        "site": read_site,
        "layers": read_layers,
        **dict.fromkeys(("positions", "queries", "keys"), read_positions),
        "heads": read_heads,
        **dict.fromkeys(("scale", "strength", "factor"), read_number),
        "relative": read_flag,
        **dict.fromkeys(("vector", "value"), read_vector),
        "directions": read_directions,
        "bias": read_bias,
        "reduce": read_reduction,
        "top_k": read_top_k,
    }
)
"""By the name of the field, which means the same in every kind."""
