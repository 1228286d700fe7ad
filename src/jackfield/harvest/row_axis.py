"""Which rows each prompt of a harvest gives, and the columns that say so: which prompt, which position, which token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, cast

import torch
from torch import Tensor

from jackfield.errors import InvalidIntervention
from jackfield.interventions.kinds import Capture, Intervention, Probe, title
from jackfield.interventions.places import named_values, parse_site
from jackfield.interventions.positions import Positions, select

IN_A_PROMPT: Final[Mapping[object, Positions]] = MappingProxyType({"all": "prompt", "generated": "last"})
"""Words that mean the same as another where no token is generated."""


@dataclass(frozen=True, slots=True)
class RowAxis:
    """The rows that all tensors of one harvest have: those at `positions`, or what `reduce` makes of them."""

    positions: Positions
    reduce: str | None

    @classmethod
    def of(cls, interventions: Sequence[Intervention]) -> "RowAxis":
        """The one that these captures and probes have. InvalidIntervention for none, several, and rows that grow."""
        kept = [each for each in interventions if isinstance(each, Capture | Probe)]
        if not kept:
            raise InvalidIntervention(
                "A harvest is of what captures and probes keep, and there is none: write "
                '[jackfield.Capture("layers.*.layer_output")].'
            )
        first, *others = map(cls._of, kept)
        for each, other in zip(kept[1:], others, strict=True):
            if other != first:
                raise InvalidIntervention(
                    f"{title(each)} has positions={other.positions!r} and reduce={other.reduce!r}, and "
                    f"{title(kept[0])} {first.positions!r} and {first.reduce!r}: tensors of one harvest have the same "
                    "rows. Write the same for all, or harvest into two folders."
                )
        for each in kept:
            first._check(each)
        return first

    @classmethod
    def _of(cls, each: Capture | Probe) -> "RowAxis":
        positions = cast("Positions", each.positions)  # they were read when it was made
        return cls(IN_A_PROMPT.get(positions, positions), each.reduce)

    def _check(self, each: Capture | Probe) -> None:
        value = named_values()[parse_site(each.site).name]
        if value.axes.split()[-1] == "k":
            raise InvalidIntervention(
                f"{title(each)}: its rows are as wide as each prompt is long, and a harvest's are of one width. "
                "model.generate gives them prompt by prompt."
            )
        if value.token_axis is None and self.reduce != "last" and self.positions != "last":
            raise InvalidIntervention(
                f"{title(each)}: {value.name} has one row a prompt; write positions='last' for all of this harvest."
            )

    def columns(self, prompt: int, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """What is said of each row of prompt number `prompt`.

        `prompt` [row] int64; `positions` and `token_ids` [row] int32, or, of a mean, over how many tokens it is:
        `count` [1] int32.
        """
        length = len(token_ids)
        chosen = select(self.positions, length, length).within(range(length))
        if self.reduce == "mean":
            return {"prompt": torch.tensor([prompt]), "count": torch.tensor([len(chosen)], dtype=torch.int32)}
        if self.reduce == "last":
            chosen = chosen[-1:]
        return {
            "prompt": torch.full((len(chosen),), prompt),
            "positions": torch.tensor(chosen, dtype=torch.int32),
            "token_ids": torch.tensor([token_ids[position] for position in chosen], dtype=torch.int32),
        }

    def rows(self, kept: Tensor) -> Tensor:
        """What a capture or a probe kept, with its axis of rows."""
        return kept if self.reduce is None else kept[None]
