"""One request's attention in one step: its rows of what the op receives, its keys out of the paged cache.

Scores and pattern are computed beside the kernel, for the rows and heads asked, from this step's queries and all of the
request's keys: on prefill, on decode and after a prefix-cache hit alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.transformers.attention_call import NEGATIVE_INFINITY
from jackfield.engines.transformers.beside import Beside, Masks
from jackfield.engines.transformers.heads import cut
from jackfield.engines.vllm.parts import WHOLE_PART, Joint
from jackfield.errors import Unavailable
from jackfield.interleave.channel import Channel, Selection
from jackfield.interleave.site import Port, Site
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker
from jackfield.values.anatomy import Projection

Gather = Callable[[], tuple[Tensor, Tensor]]
Before = Callable[[Site], Tensor | None]
"""A site to the request's rows of what was kept there, [token, width]."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What a layer's attention op is set to. `window` counts the keys a query sees, itself included."""

    scale: float
    window: int | None
    softcap: float | None
    slopes: Tensor | None
    sinks: Tensor | None
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_value: int


def op_facts(layer: Any) -> OpFacts:
    """Read off a layer of vLLM's and its implementation, whose names are those of 0.25 to 0.33."""
    impl = layer.impl
    slopes, sinks = getattr(impl, "alibi_slopes", None), getattr(impl, "sinks", None)
    cap = getattr(impl, "logits_soft_cap", None) or None  # 0 and None are off
    return OpFacts(
        float(impl.scale),
        layer.sliding_window,
        None if cap is None or cap <= 0 else float(cap),
        None if slopes is None else torch.as_tensor(slopes, dtype=torch.float32),
        None if sinks is None else sinks.detach(),
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        getattr(layer, "head_size_v", layer.head_size),  # 0.25: before values had widths of their own
    )


def left_behind(facts: OpFacts, computed: int) -> int:
    """How many positions no query sees any more, of a request of which so many have been computed before this pass."""
    return behind_window(facts.window, computed)


def behind_window(window: int | None, computed: int) -> int:
    """The same, of a layer of which a query sees so many keys."""
    return 0 if window is None else max(0, computed - window + 1)


class PagedAttention:
    """One request's rows of q, k and v [token, heads, width], views of the op's own, and what the op made of them.

    `outputs` [1, token, head, d_value] is there when the op has run, and a view as well.
    """

    def __init__(
        self,
        facts: OpFacts,
        rows: Rows,
        step: int,
        own: tuple[Tensor, Tensor, Tensor],
        gather: Gather,
        refusal: str | None,
        before: Before,
    ) -> None:
        self.own = dict(zip("qkv", own, strict=True))
        self.before = before
        self.edited: set[str] = set()  # of "q", "k", "v"
        self.outputs: Tensor | None = None
        self._facts, self._rows, self._step = facts, rows, step
        self._gather, self._refusal = gather, refusal
        self._cached: tuple[Tensor, Tensor] | None = None
        self._beside: Beside | None = None

    def edit(self, which: str) -> None:
        """Says that rows of `which` were written: what was made of them before no longer holds."""
        self.edited.add(which)
        self._beside = None
        self._cached = None

    @property
    def cached(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all of the request, [1, kv_head, key, width] each; NaN where a window dropped one."""
        if self._cached is None:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            keys, values = (held[None] for held in self._gather())
            tokens = self.own["k"].shape[0]
            keys[0, :, -tokens:], values[0, :, -tokens:] = self.own["k"].transpose(0, 1), self.own["v"].transpose(0, 1)
            self._cached = keys, values
        return self._cached

    @property
    def patches(self) -> Beside | None:
        """What was edited of scores and pattern."""
        return self._beside if self._beside is not None and self._beside.edited else None

    def forget_patches(self) -> None:
        """They have been written over the op's outputs."""
        self._beside = None

    def scores(self, rows: Rows, selection: Selection) -> Tensor:
        """[1, head, token, key], float32; masked entries are -inf."""
        return self._made().scores(rows, selection)

    def pattern(self, rows: Rows, selection: Selection) -> Tensor:
        """[1, head, token, key], float32; masked entries are 0."""
        return self._made().pattern(rows, selection)

    def write_scores(self, rows: Rows, selection: Selection, scores: Tensor) -> None:
        """Edited scores, of the shape of `scores`."""
        self._made().write_scores(rows, selection, scores)

    def write_pattern(self, rows: Rows, selection: Selection, pattern: Tensor) -> None:
        """An edited pattern, of the shape of `pattern`."""
        self._made().write_pattern(rows, selection, pattern)

    def _made(self) -> Beside:
        if self._beside is None:
            keys, values = (held.nan_to_num() if self._facts.window else held for held in self.cached)
            self._beside = Beside(
                self.own["q"].transpose(0, 1)[None],
                keys,
                values,
                self._step,
                self._rows.prompt_length,
                mask=self._mask(keys.shape[2]),
                masks=Masks(),
                scale=self._facts.scale,
                softcap=self._facts.softcap,
                sinks=self._facts.sinks,
                causal=True,
            )
        return self._beside

    def _mask(self, keys: int) -> Tensor | None:
        """[1, 1 or head, token, key] of biases and -inf; None where causality is all there is."""
        facts = self._facts
        if facts.window is None and facts.slopes is None:
            return None
        device = self.own["q"].device
        queries = torch.arange(keys - self.own["q"].shape[0], keys, device=device)[:, None]
        offsets = torch.arange(keys, device=device) - queries  # j - i
        hidden = offsets > 0 if facts.window is None else (offsets > 0) | (offsets <= -facts.window)
        biases = torch.zeros(1, 1, 1, device=device) if facts.slopes is None else facts.slopes.to(device)[:, None, None]
        return (biases * offsets).masked_fill(hidden, NEGATIVE_INFINITY)[None]


class OperandChannel(Channel):
    """Queries, keys or values as the attention op receives them: this step's rows, [1, heads, token, width]."""

    def __init__(self, name: str, op: str, which: str, joint: Joint, *, writable: bool = True) -> None:
        self.name, self.which, self.joint, self.writable = name, which, joint, writable
        self.memory = f"{op}.{which}" if writable else name
        self.site = Site(op, Port.ATTEND)

    def read(self, passing: PagedAttention, worker: Worker, selection: Selection) -> Tensor:
        rows = passing.own[self.which]
        picked = rows if selection.tokens is None else rows[list(selection.tokens)]
        heads = self.joint.join(picked, 1).transpose(0, 1)
        picked = heads if selection.heads is None else heads[list(selection.heads)]
        return picked.clone(memory_format=torch.contiguous_format)[None]

    def write(self, passing: PagedAttention, worker: Worker, selection: Selection, value: Tensor) -> None:
        rows = passing.own[self.which]
        places, own = self.joint.own(selection, rows.shape[1])
        rows[_mesh(rows, own)] = value[0, places].transpose(0, 1)
        passing.edit(self.which)


class PrerotaryChannel(Channel):
    """Queries or keys before the rotary embedding, [1, heads, token, d_head]: a cut of what was kept."""

    def __init__(self, name: str, op: str, projection: Projection, joint: Joint) -> None:
        self.name = self.memory = name
        self.writable, self.projection, self.joint = False, projection, joint
        self.site = Site(op, Port.ATTEND)

    def read(self, passing: PagedAttention, worker: Worker, selection: Selection) -> Tensor:
        kept = passing.before(self.projection.site)
        if kept is None:
            raise Unavailable(f"{self.name} passes before it was asked for; name it in the block so that it is kept.")
        heads = cut(self.joint.join(kept, -1)[None], self.projection)
        if selection.heads is not None:
            heads = heads[:, list(selection.heads)]
        picked = heads if selection.tokens is None else heads[:, :, list(selection.tokens)]
        return picked.clone(memory_format=torch.contiguous_format)


class CachedChannel(Channel):
    """Keys or values of all of the request so far, [1, kv_head, key, width]. They can be read only."""

    def __init__(self, name: str, op: str, which: int, joint: Joint) -> None:
        self.name, self.which, self.joint, self.writable = name, which, joint, False
        self.memory = f"{op}.{'kv'[which]}"
        self.site = Site(op, Port.ATTEND)

    def read(self, passing: PagedAttention, worker: Worker, selection: Selection) -> Tensor:
        held = self.joint.join(passing.cached[self.which], 1)
        return (held if selection.heads is None else held[:, list(selection.heads)]).clone()


class ScoresChannel(Channel):
    """What enters the softmax, or with `pattern` what leaves it: [1, head, token, key], float32.

    Computed of this rank's heads and then joined: keys stay where they are.
    """

    def __init__(self, name: str, op: str, joint: Joint, *, pattern: bool) -> None:
        self.name = self.memory = name
        self.joint, self.pattern, self.writable = joint, pattern, True
        self.site = Site(op, Port.PATTERN if pattern else Port.SCORES)

    def read(self, passing: PagedAttention, worker: Worker, selection: Selection) -> Tensor:
        made = passing.pattern if self.pattern else passing.scores
        if self.joint is WHOLE_PART:
            return made(worker.rows, selection)
        whole = self.joint.join(made(worker.rows, Selection(tokens=selection.tokens)), 1)
        return whole if selection.heads is None else whole[:, list(selection.heads)]

    def write(self, passing: PagedAttention, worker: Worker, selection: Selection, value: Tensor) -> None:
        places, own = self.joint.own(selection, passing.own["q"].shape[1])
        if own.heads != ():
            write = passing.write_pattern if self.pattern else passing.write_scores
            write(worker.rows, own, value[:, places])


class HeadOutputsChannel(Channel):
    """What each head writes, before gate and output projection: [1, token, head, d_value]."""

    def __init__(self, name: str, op: str, joint: Joint) -> None:
        self.name = self.memory = name
        self.joint, self.writable = joint, True
        self.site = Site(op, Port.HEADS)

    def read(self, passing: PagedAttention, worker: Worker, selection: Selection) -> Tensor:
        rows = self._rows(passing)
        picked = rows if selection.tokens is None else rows[list(selection.tokens)]
        heads = self.joint.join(picked, 1)
        picked = heads if selection.heads is None else heads[:, list(selection.heads)]
        return picked.clone(memory_format=torch.contiguous_format)[None]

    def write(self, passing: PagedAttention, worker: Worker, selection: Selection, value: Tensor) -> None:
        rows = self._rows(passing)
        places, own = self.joint.own(selection, rows.shape[1])
        rows[_mesh(rows, own)] = value[0][:, places]

    @staticmethod
    def _rows(passing: PagedAttention) -> Tensor:
        assert passing.outputs is not None
        return passing.outputs[0]


def _mesh(rows: Tensor, selection: Selection) -> Any:
    picked = [slice(None) if each is None else list(each) for each in (selection.tokens, selection.heads)]
    if slice(None) in picked:
        return tuple(picked)
    tokens, heads = (torch.tensor(each, dtype=torch.long, device=rows.device) for each in picked)
    return tokens[:, None], heads
