"""One attention module of a run: what its op receives and returns passes its blocks' slots here."""

from collections.abc import Callable
from typing import Any, Protocol

from greenlet import getcurrent
from torch import Tensor, nn

from jackfield.engines.transformers.attention_call import AttentionCall
from jackfield.engines.transformers.beside import Beside, Masks
from jackfield.engines.transformers.dispatch import AttentionFunction
from jackfield.engines.transformers.inline_attention import Inline
from jackfield.engines.transformers.soft_caps import DROPPED_BY_SDPA
from jackfield.interleave.channel import Slot
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port, Site
from jackfield.interleave.step import Rows
from jackfield.values.anatomy import AttentionAnatomy, Projection

OPERANDS = ("query", "key", "value", "attention_mask")
PORTS = (Port.ATTEND, Port.SCORES, Port.PATTERN, Port.HEADS)

BIASED = "scores and pattern: this attention adds a position bias of its own, which is not read here."


class RunState(Protocol):
    """What a tap asks of its run."""

    interleaver: Interleaver
    masks: Masks
    padded_length: int
    gradients: bool
    one_step: bool

    @property
    def rows(self) -> list[Rows]: ...
    def cache_layer(self, anatomy: AttentionAnatomy) -> tuple[Tensor, Tensor] | None: ...
    def kept(self, anatomy: AttentionAnatomy) -> dict[str, Tensor]: ...
    def nodes(self, anatomy: AttentionAnatomy) -> dict[Projection, Tensor]: ...


class AttentionTap:
    """The slots of one attention module, for as many calls as it makes in a step."""

    def __init__(self, run: RunState, anatomy: AttentionAnatomy) -> None:
        self.run, self.anatomy = run, anatomy
        self.calls = 0  # in this step
        self._slots: dict[int, list[Slot]] = {}

    def slots(self, call: int) -> list[Slot]:
        """The slots of one call: operands, scores, pattern, head outputs."""
        if call not in self._slots:
            self._slots[call] = [self.run.interleaver.slots[Site(self.anatomy.path, port, call)] for port in PORTS]
        return self._slots[call]

    @property
    def waited_for(self) -> bool:
        """Whether a block waits at this module now."""
        return any(slot.workers for call in range(self.anatomy.calls) for slot in self.slots(call))

    def dispatch(
        self,
        function: AttentionFunction,
        implementation: str | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """A call of the attention interface: what the model would have run runs, with what blocks changed."""
        if getcurrent() is not self.run.interleaver.home:
            return function(module, *args, **kwargs)
        slots = self.slots(self.calls)
        self.calls += 1
        if not any(slot.workers for slot in slots):
            self._mark(slots)
            return function(module, *args, **kwargs)
        named = dict(zip((*OPERANDS, "scaling"), args, strict=False))
        options = {**{name: item for name, item in named.items() if name not in OPERANDS}, **kwargs}
        q, k, v, mask = (named[name] if name in named else options.pop(name, None) for name in OPERANDS)
        call = self._beside(q, k, v, mask, options, implementation, module)
        self._offer(slots, call)
        outputs, weights = function(module, call.q, call.k, call.v, mask, **options)
        call.outputs = outputs
        self._finish(slots, call)
        return call.outputs, weights

    # -- the op's own maths, listened to (listening.AttentionListener)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        scale: float | None,
        run: Callable[..., Tensor],
        causal: bool = False,
    ) -> Tensor:
        """A module that calls scaled dot-product attention itself. Returns [batch, head, token, d_value]."""
        slots = self.slots(self.calls)
        self.calls += 1
        call = Beside(
            q, k, v, *self._place, mask=mask, masks=self.run.masks, scale=scale, softcap=None, sinks=None, causal=causal
        )
        self._equip(call)
        self._offer(slots, call)
        call.outputs = run(call.q, call.k, call.v).transpose(1, 2)
        self._finish(slots, call)
        return call.outputs.transpose(1, 2)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The operands of an op that does its own softmax."""
        slots = self.slots(self.calls)
        self._inline = call = Inline(q, k, v, *self._place)
        self._equip(call)
        slots[0].passed = self.run.interleaver.clock
        self.run.interleaver.meet(slots[0], call)
        changed = [new if new is not old else None for new, old in ((call.q, q), (call.k, k), (call.v, v))]
        return changed[0], changed[1], changed[2]

    def scores(self, scores: Tensor) -> Tensor | None:
        """What enters its softmax."""
        call, slot = self._inline, self.slots(self.calls)[1]
        call.arrive(scores)
        call.remember_mask(self.run.rows)
        slot.passed = self.run.interleaver.clock
        self.run.interleaver.meet(slot, call)
        return call.depart()

    def pattern(self, pattern: Tensor) -> Tensor | None:
        """What leaves its softmax."""
        call, slot = self._inline, self.slots(self.calls)[2]
        call.arrive(pattern)
        call.after_softmax(self.run.rows)
        slot.passed = self.run.interleaver.clock
        self.run.interleaver.meet(slot, call)
        return call.depart()

    def heads(self, z: Tensor) -> Tensor | None:
        """The head outputs [batch, token, head, d_value]."""
        call, slot = self._inline, self.slots(self.calls)[3]
        self.calls += 1
        call.outputs = z.clone()
        slot.passed = self.run.interleaver.clock
        version = call.outputs._version
        self.run.interleaver.meet(slot, call)
        return call.outputs if call.outputs._version != version else None

    _inline: Inline

    @property
    def _place(self) -> tuple[int, int]:
        return self.run.interleaver.step, self.run.padded_length

    def _mark(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.passed = self.run.interleaver.clock

    def _offer(self, slots: list[Slot], call: AttentionCall) -> None:
        for slot in slots[:3]:
            slot.passed = self.run.interleaver.clock
            if slot.workers:
                self.run.interleaver.meet(slot, call)

    def _finish(self, slots: list[Slot], call: Beside) -> None:
        assert call.outputs is not None
        if call.edited:
            call.overwrite(call.outputs)
        slots[3].passed = self.run.interleaver.clock
        if slots[3].workers:
            self.run.interleaver.meet(slots[3], call)

    def _beside(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        options: dict[str, Any],
        implementation: str | None,
        module: nn.Module,
    ) -> Beside:
        used = {name: item for name, item in options.items() if implementation != "sdpa" or name not in DROPPED_BY_SDPA}
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        call = Beside(
            q,
            k,
            v,
            *self._place,
            mask=mask,
            masks=self.run.masks,
            scale=used.get("scaling"),
            softcap=used.get("softcap"),
            sinks=used.get("s_aux"),
            causal=bool(causal) and implementation != "eager",  # without a mask, eager attention masks nothing
            refusal=None if options.get("position_bias") is None else BIASED,
        )
        call.extra = {name: item for name, item in options.items() if not isinstance(item, Tensor)}
        self._equip(call)
        return call

    def _equip(self, call: AttentionCall) -> None:
        call.cache = self.run.cache_layer(self.anatomy)
        call.prerotary = self.run.kept(self.anatomy)
        call.gradients, call.one_step = self.run.gradients, self.run.one_step
        call.nodes = self.run.nodes(self.anatomy) if call.gradients else {}
