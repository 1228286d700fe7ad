"""Interventions beside one request: data only, which an engine that has nothing better runs as a block.

An engine that can do the same without Python, out of tables, reads `interventions` instead of binding the block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from jackfield.interventions.kinds import Intervention, places
from jackfield.interventions.running import Running
from jackfield.trace.tracer import Tracer


@dataclass(frozen=True, slots=True)
class InterventionBlock:
    """What a request's engine gets. Made by `Plan.block`, which checks.

    `interventions` apply in order at one site. Their tensors are [width] and [n, width] in float32 (float64 for a
    float64 model), a Project's directions orthonormal, a Probe's bias [n]. `shapes` are those of one kept row, by its
    name in `Result.saved`.
    """

    interventions: tuple[Intervention, ...]
    num_layers: int
    shapes: Mapping[str, tuple[int, ...]]
    prompt_length: int
    max_tokens: int
    module: ClassVar[str] = ""  # none of the user's: what is shipped with it can be imported anywhere
    origin: ClassVar[str] = "the interventions"

    @property
    def names(self) -> frozenset[str]:
        """The values that it reads."""
        return frozenset(place.name for each in self.interventions for place in places(each, self.num_layers))

    def bind(self, t: Tracer, device: torch.device, model: Any = None) -> Callable[[], None]:
        """What runs it beside the request of `t`, on a model of this process."""
        return Running(self, t, device, model).run
