"""What passes at a tap, for one request: its own rows of vLLM's tensors, as the batch of one that channels take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from jackfield.engines.vllm.parts import WHOLE_PART, Joint
from jackfield.interleave.site import Site
from jackfield.interleave.worker import Channel, Selection, Worker


@dataclass(slots=True)
class Halves:
    """A request's rows of the one tensor that passes, or of the two whose sum is the stream: [token, width] views."""

    x: Tensor
    residual: Tensor | None = None


class StreamChannel(Channel):
    """A value of the stream, a sublayer or a norm: [1, token, width].

    `summed`: the tensors at the site are two halves; `joint`: of what passes, this rank has its part. A stream in two
    halves is nobody's buffer; an edited row goes back as (edited, 0), because in bfloat16 a difference added to one
    half misses by units where the other is large.
    """

    def __init__(
        self, name: str, site: Site, *, summed: bool = False, factor: float = 1.0, joint: Joint = WHOLE_PART
    ) -> None:
        self.name = self.memory = name
        self.site, self.summed, self.factor, self.writable = site, summed, factor, True
        self.joint = joint

    def read(self, passing: Halves, worker: Worker, selection: Selection) -> Tensor:
        rows = self._rows(passing, selection)
        return (rows.clone() if rows is passing.x else rows)[None]  # all others are new already

    def write(self, passing: Halves, worker: Worker, selection: Selection, value: Tensor) -> None:
        tokens: Any = slice(None) if selection.tokens is None else list(selection.tokens)
        before, after = self._rows(passing, selection), value[0]
        changed = (before != after).any(-1, keepdim=True)
        given = self.joint.cut(after if self.factor == 1.0 else after / self.factor, -1)
        passing.x[tokens] = torch.where(changed, given, passing.x[tokens])
        if self.summed and passing.residual is not None and selection.tokens is None:
            passing.residual.masked_fill_(changed, 0)
        elif self.summed and passing.residual is not None:
            passing.residual[tokens] = passing.residual[tokens].masked_fill(changed, 0)

    def _rows(self, passing: Halves, selection: Selection) -> Tensor:
        """The whole of the selected rows: a view where it is `passing.x`."""
        tokens = selection.tokens
        x, residual = (
            each if each is None or tokens is None else each[list(tokens)] for each in (passing.x, passing.residual)
        )
        assert x is not None
        rows = self.joint.join(x, -1)
        if self.summed and residual is not None:
            rows = rows + residual
        return rows if self.factor == 1.0 else rows * self.factor


class HeadsChannel(StreamChannel):
    """Heads side by side on the width of what passes: [1, token, head, d_value]."""

    def __init__(self, name: str, site: Site, num_heads: int, joint: Joint = WHOLE_PART) -> None:
        super().__init__(name, site, joint=joint)
        self.num_heads = num_heads

    def read(self, passing: Halves, worker: Worker, selection: Selection) -> Tensor:
        whole = super().read(passing, worker, Selection(tokens=selection.tokens))
        rows = whole.view(*whole.shape[:-1], self.num_heads, -1)
        return rows if selection.heads is None else rows[:, :, list(selection.heads)]

    def write(self, passing: Halves, worker: Worker, selection: Selection, value: Tensor) -> None:
        tokens = Selection(tokens=selection.tokens)
        whole = self.read(passing, worker, tokens)
        whole[:, :, slice(None) if selection.heads is None else list(selection.heads)] = value
        super().write(passing, worker, tokens, whole.flatten(-2))


class HeadResultsChannel(HeadsChannel):
    """Each head's part of the output projection's result: [1, token, head, d_model].

    The projection itself is asked, with all other heads at zero: its weights may be packed, quantized or cut. `given`
    is how what it gives is had of the ranks' parts.
    """

    def __init__(
        self,
        name: str,
        site: Site,
        num_heads: int,
        joint: Joint,
        projection: Callable[..., Any],
        given: Joint,
    ) -> None:
        super().__init__(name, site, num_heads, joint)
        self.writable, self.projection, self.given = False, projection, given

    def read(self, passing: Halves, worker: Worker, selection: Selection) -> Tensor:
        premix = super().read(passing, worker, Selection(tokens=selection.tokens))[0]
        heads = range(self.num_heads) if selection.heads is None else selection.heads
        alone = premix.new_zeros(1 + len(heads), *premix.shape)
        for place, head in enumerate(heads, start=1):
            alone[place, :, head] = premix[:, head]
        results = self.projection(self.joint.cut(alone.flatten(2).flatten(0, 1), -1).contiguous())
        given = self.given.join(cast("Tensor", results[0] if isinstance(results, tuple) else results), -1)
        made = given.view(1 + len(heads), -1, given.shape[-1])
        return (made[1:] - made[:1]).transpose(0, 1).clone()[None]  # what nothing gives is the bias


class LogitsChannel(Channel):
    """The row that is sampled from, [1, 1, vocab]; or, `softmax`, its probabilities [1, vocab], float32."""

    def __init__(self, name: str, site: Site, *, softmax: bool = False) -> None:
        self.name, self.memory, self.site, self.softmax, self.writable = name, name, site, softmax, not softmax

    def read(self, passing: Halves, worker: Worker, selection: Selection) -> Tensor:
        return torch.softmax(passing.x.float(), -1) if self.softmax else passing.x.clone()[None]

    def write(self, passing: Halves, worker: Worker, selection: Selection, value: Tensor) -> None:
        passing.x.copy_(value[0])
