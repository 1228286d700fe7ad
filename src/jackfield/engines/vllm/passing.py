"""Values of what passes at a tap: a request's own rows of vLLM's tensors, as the batch of one that blocks get."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch import (
    _foreach_add as add_each,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
)
from torch import (
    _foreach_copy_ as copy_each,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
)
from torch import (
    _foreach_mul as multiply_each,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
)

from jackfield.engines.vllm.gathering import Halves, RowsChannel, split
from jackfield.engines.vllm.parts import WHOLE_PART, Joint
from jackfield.interleave.channel import WHOLE, Channel, Selection
from jackfield.interleave.site import Site
from jackfield.interleave.worker import Worker


class StreamChannel(RowsChannel):
    """A value of the stream, a sublayer or a norm: [1, token, width].

    `summed`: the tensors at the site are two halves; `joint`: of what passes, this rank has its part. A stream in two
    halves is nobody's buffer; an edited row goes back as (edited, 0), because in bfloat16 a difference added to one
    half misses by units where the other is large.
    """

    def __init__(
        self, name: str, site: Site, *, summed: bool = False, factor: float = 1.0, joint: Joint = WHOLE_PART
    ) -> None:
        self.name, self.memory = name, str(site)  # also where it is one of two halves there, and they are added
        self.site, self.summed, self.factor, self.writable = site, summed, factor, True
        self.joint, self.together = joint, joint is WHOLE_PART

    def read(self, passing: Halves, worker: Worker, selection: Selection) -> Tensor:
        passing.settle()
        places: Any = _places(selection)
        x, residual = passing.x[places], passing.residual
        rows = self._whole(x, None if residual is None else residual[places])
        return (rows.clone() if rows is x else rows)[None]  # all others are new already

    def read_together(self, waiting: Sequence[Halves]) -> Sequence[Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # a tensor born in it has no version counter
            cut = waiting[0].tapped.cut(waiting)
            if not self.summed or cut.residual is None:
                return multiply_each(cut.x, self.factor)  # by 1 no bit changes
            rows = add_each(cut.x, cut.residual)
            return rows if self.factor == 1.0 else multiply_each(rows, self.factor)

    def write(self, passing: Halves, worker: Worker, selection: Selection, value: Tensor) -> None:
        if passing.edit is not None:
            passing.settle()
        tapped = passing.tapped
        x = tapped.x  # an edit that is unlike it fails, and by itself
        if (
            tapped.delays
            and self.together
            and selection.tokens is None
            and value.dtype is x.dtype
            and value.device == x.device
        ):
            passing.edit = self, value
        else:
            self._write(passing, selection, value)

    def write_alone(self, passing: Halves, value: Tensor) -> None:
        self._write(passing, WHOLE, value)

    def write_together(self, edited: Sequence[Halves]) -> None:
        if len(edited) == 1 and edited[0].edit is not None:
            self.write_alone(edited[0], edited[0].edit[1])
            return
        cut = edited[0].tapped.cut(edited)
        residual = None if cut.residual is None else torch.cat(cut.residual, 1)
        after = torch.cat([each.edit[1] for each in edited if each.edit is not None], 1)
        x, changed = self._edited(torch.cat(cut.x, 1), residual, after)
        copy_each(cut.x, split(x, cut.sizes))
        if self.summed and residual is not None and cut.residual is not None:
            copy_each(cut.residual, split(residual.masked_fill_(changed, 0), cut.sizes))

    def _write(self, passing: Halves, selection: Selection, value: Tensor) -> None:
        places: Any = _places(selection)
        x, residual = passing.x, passing.residual
        edited, changed = self._edited(x[places], None if residual is None else residual[places], value[0])
        x[places] = edited
        if self.summed and residual is not None:
            residual[places] = residual[places].masked_fill(changed, 0)

    def _edited(self, x: Tensor, residual: Tensor | None, after: Tensor) -> tuple[Tensor, Tensor]:
        """What `x` is to be when the value is `after`, and which rows that changes [..., row, 1]."""
        changed = (self._whole(x, residual) != after).any(-1, keepdim=True)
        given = self.joint.cut(after if self.factor == 1.0 else after / self.factor, -1)
        return torch.where(changed, given, x), changed

    def _whole(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The value of these rows: `x` itself where it is that."""
        rows = self.joint.join(x, -1)
        if self.summed and residual is not None:
            rows = rows + residual
        return rows if self.factor == 1.0 else rows * self.factor


def _places(selection: Selection) -> slice | list[int]:
    """The selected tokens as an index: a slice where they follow one another, since a list has to go to the device."""
    tokens = selection.tokens
    if tokens is None:
        return slice(None)
    follow = all(token == tokens[0] + place for place, token in enumerate(tokens))
    return slice(tokens[0], tokens[0] + len(tokens)) if follow else list(tokens)


class HeadsChannel(StreamChannel):
    """Heads side by side on the width of what passes: [1, token, head, d_value]."""

    def __init__(self, name: str, site: Site, num_heads: int, joint: Joint = WHOLE_PART) -> None:
        super().__init__(name, site, joint=joint)
        self.num_heads = num_heads

    def read(self, passing: Halves, worker: Worker, selection: Selection) -> Tensor:
        rows = self._by_head(super().read(passing, worker, Selection(tokens=selection.tokens)))
        return rows if selection.heads is None else rows[:, :, list(selection.heads)]

    def read_together(self, waiting: Sequence[Halves]) -> Sequence[Tensor]:
        with torch.inference_mode(False):
            return [self._by_head(whole) for whole in super().read_together(waiting)]

    def write(self, passing: Halves, worker: Worker, selection: Selection, value: Tensor) -> None:
        tokens, whole = Selection(tokens=selection.tokens), value
        if selection.heads is not None:
            whole = self.read(passing, worker, tokens)
            whole[:, :, list(selection.heads)] = value
        super().write(passing, worker, tokens, whole.flatten(-2))

    def _by_head(self, whole: Tensor) -> Tensor:
        return whole.view(*whole.shape[:-1], self.num_heads, -1)


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
        self.writable, self.projection, self.given, self.together = False, projection, given, False

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
