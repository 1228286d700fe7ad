"""The probe: one short prompt through the loaded engine, of which every tap keeps what passes.

It runs as any request does, so what it shows holds for the engine as it was started: compiled or not, on this backend.
That each tap told of something is the proof that it is alive; that the model's last hidden states are those of the same
prompt uncompiled is the proof that compiling along with the taps changed nothing.
"""

from typing import Any

import torch
from torch import Tensor

from jackfield.engines.vllm.seen import Seen
from jackfield.interleave.site import Site

PROBE = b"probe"
PLAIN = b"plain probe"
"""What stands in the place of a block. The plain one runs uncompiled, and is what compiled code is held against."""


class Recorder:
    """Keeps what passes in the probe's first pass."""

    def __init__(self, request_id: str, *, uncompiled: bool) -> None:
        self.request_id, self.uncompiled = request_id, uncompiled
        self.rows: slice | None = None  # in the pass that goes on
        self.seen: list[Seen] = []
        self.forms: dict[Site, tuple[int, torch.dtype]] = {}  # how wide a row is, and of which dtype
        self.done = False

    def keep(self, site: Site, x: Tensor, residual: Tensor | None) -> None:
        """A copy of the probe's rows of what passes."""
        if self.rows is not None:
            self.forms[site] = x.shape[1:].numel(), x.dtype
            self.seen.append(Seen(site, self._own(x), None if residual is None else self._own(residual)))

    def _own(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return tensor[self.rows].detach().flatten(1).clone().float()


def rows_of(recorder: Recorder | None, rows: Any) -> slice | None:
    """The probe's rows in a pass, if it has any there and this is its first."""
    if recorder is None or recorder.done:
        return None
    own = (slice(first, first + count) for name, first, count, _ in rows if name == recorder.request_id and count)
    return next(own, None)
