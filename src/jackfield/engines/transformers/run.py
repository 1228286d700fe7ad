"""One batch going through `generate` with blocks beside it: gates and taps where blocks wait, gone at the end."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from jackfield.engines.transformers.beside import Masks
from jackfield.engines.transformers.dispatch import SWITCHBOARD
from jackfield.engines.transformers.gate import Call, Gate
from jackfield.engines.transformers.listening import listen, listen_projection
from jackfield.engines.transformers.tap import AttentionTap
from jackfield.interleave.interleaver import Interleaver
from jackfield.interleave.site import Port, Site
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Slot, Worker
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, Formula, Missing, Projection
from jackfield.values.attention import AttentionValues
from jackfield.values.tree import named_modules
from jackfield.values.value import declared

RAW_NAMES = frozenset({"input", "inputs", "output"})
# What a block reads through these does not stand in its code.
DYNAMIC_NAMES = frozenset({"getattr", "attrgetter", "read"})
PREROTARY = frozenset({"attention_queries_prerotary", "attention_keys_prerotary"})
AFTER_THE_OP = frozenset({"attention_premix", "attention_head_results"})
OF_THE_OP = frozenset(value.name for value in declared(AttentionValues)) - AFTER_THE_OP | {"attn"}


class Run:
    """The interleaver of one batch, and what it has put up in the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: Anatomy,
        workers: Sequence[Worker],
        padded_length: int,
        names: frozenset[str],
    ) -> None:
        self.model, self.anatomy, self.padded_length = model, anatomy, padded_length
        self.interleaver = Interleaver(workers, self._open)
        self.batch_size = workers[0].batch_size if workers else 1
        self.masks = Masks()
        self.input_ids: Tensor | None = None
        self.cache: Any = None
        self._gates: dict[str, Gate] = {}
        self._modules = named_modules(model) if names & RAW_NAMES else {}
        self._taps = {
            layer.attention.path: AttentionTap(self, layer.attention)
            for layer in anatomy.layers
            if isinstance(layer.attention, AttentionAnatomy)
        }
        self._connected: dict[nn.Module, AttentionTap] = {}
        self._names = names
        self._listens = False

    @property
    def rows(self) -> list[Rows]:
        """The rows of the batch's requests."""
        return [worker.rows for worker in self.interleaver.workers]

    def start(self) -> None:
        """Runs every block up to what it first waits for, and puts up gates if one waits."""
        self.interleaver.start()
        root = self._gate("")
        root.on_enter, root.on_leave = self._begin, self._end
        if self.interleaver.alive:
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
            for gate in reversed(self._gates.values()):
                gate.close()  # the last first: a module that has two paths has two gates
            self._gates.clear()
            self._taps.clear()
            self.masks.clear()
            self.cache = self.input_ids = None

    def cache_layer(self, anatomy: AttentionAnatomy) -> tuple[Tensor, Tensor] | None:
        """What the cache holds of a layer, for later steps."""
        layers = getattr(self.cache, "layers", ())
        index = anatomy.cache_layer
        if index is None or index >= len(layers) or getattr(layers[index], "keys", None) is None:
            return None
        return layers[index].keys, layers[index].values

    def kept(self, anatomy: AttentionAnatomy) -> dict[str, Tensor]:
        """The projections of this step that were kept for their pre-rotary heads."""
        paths = {projection.site.path for projection in projections(anatomy)}
        gates = [self._gates[path] for path in paths if path in self._gates]
        return {gate.path: gate.kept for gate in gates if gate.kept is not None}

    def _put_up(self) -> None:
        """Gates on whatever holds other modules: one put up while its module runs would not see it leave."""
        containers = [
            path for layer in self.anatomy.layers for path in (layer.path, layer.attention_path, layer.mlp_path)
        ]
        for path in dict.fromkeys(path for path in (*containers, *self._modules) if path):
            self._gate(path)
        unnamed = bool(self._names & DYNAMIC_NAMES)
        for site in self._sites(unnamed):
            self._open(self.interleaver.slot(site))
        if unnamed or self._names & PREROTARY:
            for tap in self._taps.values():
                self._keep_projections(tap.anatomy)
        if not self._listens and (unnamed or self._names & OF_THE_OP):
            self._listen()

    def _sites(self, unnamed: bool) -> Iterator[Site]:
        """Where values pass that blocks may read: looked at from the start, a read that comes too late is seen to."""
        for values in (self.anatomy.values, *(layer.values for layer in self.anatomy.layers)):
            for name, formula in values.items():
                if isinstance(formula, Formula) and (unnamed or name in self._names):
                    yield formula.site
        for tap in self._taps.values():
            projection = tap.anatomy.output_projection
            if projection is not None and (unnamed or self._names & AFTER_THE_OP):
                yield Site(projection, Port.INPUT)

    def _begin(self, call: Call) -> None:
        self.input_ids = call.argument("input_ids")
        self.cache = call.argument("past_key_values")
        for tap in self._taps.values():
            tap.calls = 0
        self.interleaver.begin(self.interleaver.step + 1)

    def _end(self, call: Call) -> None:
        self.interleaver.end()
        self.masks.clear()
        for gate in self._gates.values():
            gate.kept = None

    def _open(self, slot: Slot) -> None:
        """A block waits at a site that nothing looks at yet."""
        port, path = slot.site.port, slot.site.path
        if port in (Port.INPUT, Port.OUTPUT):
            self._gate(path)
        elif port is Port.PROJECT:
            self._gate(path).around = self._around_router(slot)
        elif not self._listens:
            self._listen()
        if port is Port.ATTEND and "prerotary" in "".join(worker.wanted for worker in self.interleaver.workers):
            self._keep_projections(self._taps[path].anatomy)

    def _listen(self) -> None:
        """Has every attention op of the model tell its tap first."""
        self._listens = True
        for tap in self._taps.values():
            gate = self._gate(tap.anatomy.path)
            if tap.anatomy.dispatched:
                self._connected[gate.module] = tap
            else:
                gate.around = self._around_attention(tap)
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
            slot.passed = self.interleaver.step
            passing = Call(self._gate(slot.site.path), (), {}, logits)
            version = logits._version
            self.interleaver.meet(slot, passing)
            return logits if logits._version != version else None

        def around(call: Call) -> AbstractContextManager[Any] | None:
            if slot.workers:
                return listen_projection(call.gate.module, project)
            slot.passed = self.interleaver.step
            return None

        return around

    def _keep_projections(self, anatomy: AttentionAnatomy) -> None:
        for projection in projections(anatomy):
            self._gate(projection.site.path).keep_output = True

    def _gate(self, path: str) -> Gate:
        if path not in self._gates:
            gate = self._gates[path] = Gate(self.interleaver, self.model.get_submodule(path), path)
            gate.put_up()
            gate.before.open = gate.after.open = True
        return self._gates[path]


def projections(anatomy: AttentionAnatomy) -> list[Projection]:
    """The projections whose results hold pre-rotary queries and keys."""
    found: list[Projection] = []
    for heads in (anatomy.queries_prerotary, anatomy.keys_prerotary):
        if not isinstance(heads, Missing):
            found.extend(heads if isinstance(heads, tuple) else [heads])
    return found
