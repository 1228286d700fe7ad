"""One batch going through `generate` with blocks beside it: gates and taps where blocks wait, gone at the end."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from jackfield.engines.transformers.beside import Masks
from jackfield.engines.transformers.dispatch import SWITCHBOARD
from jackfield.engines.transformers.gate import Call, Gate
from jackfield.engines.transformers.gates import AFTER_THE_OP, Gates, Place
from jackfield.engines.transformers.graph import beginning, begun, heads_of
from jackfield.engines.transformers.listening import listen, listen_projection
from jackfield.engines.transformers.tap import AttentionTap
from jackfield.interleave.channel import Slot
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker
from jackfield.values.anatomy import AttentionAnatomy, Missing, Projection
from jackfield.values.attention import AttentionValues
from jackfield.values.tree import RAW_NAMES, named_modules
from jackfield.values.value import declared

# What a block reads through these does not stand in its code.
DYNAMIC_NAMES = frozenset({"getattr", "attrgetter", "read"})
PREROTARY = frozenset({"attention_queries_prerotary", "attention_keys_prerotary"})
OF_THE_OP = frozenset(value.name for value in declared(AttentionValues)) - AFTER_THE_OP | {"attn"}


class Run:
    """The interleaver of one batch, and what it has put up in the model."""

    def __init__(
        self,
        gates: Gates,
        workers: Sequence[Worker],
        padded_length: int,
        names: frozenset[str],
        *,
        gradients: bool = False,
        one_step: bool = False,
    ) -> None:
        self.anatomy, self.padded_length, self.gradients = gates.anatomy, padded_length, gradients
        self.one_step = one_step
        self.interleaver = Interleaver(workers, self._open, gates.slots)
        self.batch_size = workers[0].batch_size if workers else 1
        self.masks = Masks()
        self.input_ids: Tensor | None = None
        self.cache: Any = None
        self._gates = gates
        gates.renew()
        self._up: dict[str, Gate] = {}
        self._opened: list[Slot] = []
        self._keeping: list[Gate] = []
        self._taps: dict[str, AttentionTap] = {}
        self._connected: dict[nn.Module, AttentionTap] = {}
        self._nodes: dict[Projection, Tensor] = {}
        self._names = names

    @property
    def rows(self) -> list[Rows]:
        """The rows of the batch's requests."""
        return [worker.rows for worker in self.interleaver.workers]

    def start(self) -> None:
        """Runs every block up to what it first waits for, and puts up gates if one waits."""
        self.interleaver.start()
        if self.interleaver.alive:
            root = self._gate("")
            root.extras.on_enter, root.extras.on_leave = self._begin, self._end
            if self.gradients:
                self._gate(beginning(self.anatomy) or "").change_output(begun)
            self._put_up()

    def close(self) -> None:
        """Ends the blocks and takes everything down: the model is as it was.

        An interrupt may end it anywhere: all of it may be done again.
        """
        try:
            self.interleaver.close()
        finally:
            SWITCHBOARD.disconnect(self._connected)
            self._connected = {}
            for gate in reversed(self._up.values()):
                gate.close()  # the last first: a module that has two paths has two gates
            for slot in self._opened:
                slot.open = False
            self._up.clear()
            self._taps.clear()
            self._nodes.clear()
            self.masks.clear()
            self.cache = self.input_ids = None

    def cache_layer(self, anatomy: AttentionAnatomy) -> tuple[Tensor, Tensor] | None:
        """What the cache holds of a layer, for later steps; None where none follows."""
        if self.one_step and self.gradients:  # elsewhere an edit that is not cached is refused, however many follow
            return None
        layers = getattr(self.cache, "layers", ())
        index = anatomy.cache_layer
        if index is None or index >= len(layers) or getattr(layers[index], "keys", None) is None:
            return None
        return layers[index].keys, layers[index].values

    def kept(self, anatomy: AttentionAnatomy) -> dict[str, Tensor]:
        """The projections of this step that were kept for their pre-rotary heads."""
        if not self._keeping:
            return {}
        paths = {projection.site.path for projection in projections(anatomy)}
        kept = {gate.path: gate.extras.kept for gate in self._keeping if gate.path in paths}
        return {path: projected for path, projected in kept.items() if projected is not None}

    def nodes(self, anatomy: AttentionAnatomy) -> dict[Projection, Tensor]:
        """With gradients, the pre-rotary heads of this step that the model went on from."""
        own = set(projections(anatomy))
        return {projection: heads for projection, heads in self._nodes.items() if projection in own}

    def _put_up(self) -> None:
        """Gates and taps where values pass that blocks may read: a read that comes too late is then seen to."""
        for path in self._gates.containers:
            self._gate(path)
        if self._names & RAW_NAMES:
            for path in named_modules(self._gates.model):
                self._gate(path)
        unnamed = bool(self._names & DYNAMIC_NAMES)
        for name, place in self._gates.places.items():
            if unnamed or name in self._names:
                self._look_at(name, place)
        if unnamed or self._names & OF_THE_OP:
            self._listen()
        if unnamed or self._names & PREROTARY:
            for attention in self._attentions():
                self._keep_projections(attention)

    def _look_at(self, name: str, place: Place) -> None:
        up, interleaver = self._up, self.interleaver
        for gate in self._gates.gates_of(name):
            if gate.path not in up:
                up[gate.path] = gate
                gate.put_up(interleaver)
        for site in place.inside:
            self._open(self.interleaver.slots[site])

    def _attentions(self) -> Iterator[AttentionAnatomy]:
        attentions = (layer.attention for layer in self.anatomy.layers)
        return (attention for attention in attentions if isinstance(attention, AttentionAnatomy))

    def _begin(self, call: Call) -> None:
        self.input_ids = call.argument("input_ids")
        self.cache = call.argument("past_key_values")
        for tap in self._taps.values():
            tap.calls = 0
        self._gates.clock += 1
        self.interleaver.begin(self.interleaver.step + 1, self._gates.clock)

    def _end(self, call: Call) -> None:
        self.interleaver.end()
        self.masks.clear()
        self._nodes.clear()
        for gate in self._keeping:
            gate.extras.kept = None

    def _open(self, slot: Slot) -> None:
        """A block waits at a site that nothing looks at yet."""
        self._opened.append(slot)
        port, path = slot.site.port, slot.site.path
        if port in (Port.INPUT, Port.OUTPUT):
            self._gate(path)
        elif port is Port.PROJECT:
            self._gate(path).extras.around = self._around_router(slot)
        else:
            self._listen()
        if port is Port.ATTEND and "prerotary" in "".join(worker.wanted for worker in self.interleaver.workers):
            self._keep_projections(self._taps[path].anatomy)

    def _listen(self) -> None:
        """Has every attention op of the model tell its tap first."""
        if self._taps:
            return
        self._taps = {attention.path: AttentionTap(self, attention) for attention in self._attentions()}
        for path, tap in self._taps.items():
            gate = self._gate(path)
            if tap.anatomy.dispatched:
                self._connected[gate.module] = tap
            else:
                gate.extras.around = self._around_attention(tap)
        SWITCHBOARD.connect(self._connected)

    def _around_attention(self, tap: AttentionTap) -> Any:
        anatomy = tap.anatomy

        def around(call: Call) -> AbstractContextManager[Any] | None:
            tap.calls = 0
            return listen(
                call.gate.module,
                tap,
                lambda: self.cache_layer(anatomy),
                anatomy.num_heads,
                anatomy.num_kv_heads,
                self.batch_size,
            )

        return around

    def _around_router(self, slot: Slot) -> Any:
        def project(logits: Tensor) -> Tensor | None:
            slot.passed = self.interleaver.clock
            passing = Call(self._gate(slot.site.path), (), {}, logits)
            version = logits._version
            self.interleaver.meet(slot, passing)
            return logits if logits._version != version else None

        def around(call: Call) -> AbstractContextManager[Any] | None:
            if slot.workers:
                return listen_projection(call.gate.module, project)
            slot.passed = self.interleaver.clock
            return None

        return around

    def _keep_projections(self, anatomy: AttentionAnatomy) -> None:
        for projection in projections(anatomy):
            gate = self._gate(projection.site.path)
            if not gate.extras.keep_output:
                gate.extras.keep_output = True
                self._keeping.append(gate)
            if self.gradients and projection.repeat == 1:
                gate.change_output(partial(self._through_heads, projection))

    def _through_heads(self, projection: Projection, result: Tensor) -> Tensor:
        self._nodes[projection], made = heads_of(result, projection)
        return made

    def _gate(self, path: str) -> Gate:
        """The gate of a module, put up with those of the modules around it."""
        gate = self._up.get(path)
        if gate is None:
            for above in self._gates.above(path):
                if above not in self._up:
                    self._put_up_at(above)
            gate = self._put_up_at(path)
        return gate

    def _put_up_at(self, path: str) -> Gate:
        gate = self._up[path] = self._gates.gate(path)
        gate.put_up(self.interleaver)
        return gate


def projections(anatomy: AttentionAnatomy) -> list[Projection]:
    """The projections whose results hold pre-rotary queries and keys."""
    found: list[Projection] = []
    for heads in (anatomy.queries_prerotary, anatomy.keys_prerotary):
        if not isinstance(heads, Missing):
            found.extend(heads if isinstance(heads, tuple) else [heads])
    return found
