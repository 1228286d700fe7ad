"""The tap of an attention op: a wrapper on its implementation's `forward`, which vLLM looks up at each call.

Keys and values are in the cache before it runs. Edited ones are put there again, so queries, keys and values may be
read and edited in any order. torch.compile does not see the wrapper, and need not.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from jackfield.engines.vllm.attention import OpFacts, PagedAttention, left_behind
from jackfield.engines.vllm.cache import CacheReader
from jackfield.engines.vllm.taps import NOW
from jackfield.interleave.channel import Slot, Slots
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Worker

if TYPE_CHECKING:
    from jackfield.engines.vllm.forward_pass import ForwardPass

Blocks = Callable[[str, "ForwardPass", Worker], tuple[Tensor, int]]
"""A layer's name, a pass and a request to the request's blocks in that layer's cache, and how many tokens they hold."""


class OpTap:
    """One layer's attention op. Its `path` in the model names its sites; vLLM knows its cache by `name`."""

    def __init__(
        self,
        name: str,
        layer: Any,
        path: str,
        facts: OpFacts,
        slots: Slots,
        blocks: Blocks,
        slot_mapping: Callable[[str], Tensor],
    ) -> None:
        self.name, self.layer, self.path, self.facts = name, layer, path, facts
        self.reader: CacheReader | str = "its cache was not looked at"
        self.feeds: int | None = None  # the tap, by number, of a projection that is given what the op made
        self._blocks, self._slot_mapping = blocks, slot_mapping
        ports = (Port.ATTEND, Port.SCORES, Port.PATTERN, Port.HEADS)
        self._attend, *self._after = (slots[Site(path, port)] for port in ports)
        self._views: dict[Worker, PagedAttention] = {}

    def put_up(self) -> None:
        """Takes the place of the implementation's forward."""
        impl = self.layer.impl
        forward = impl.forward

        def tapped(
            layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: Any, metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            now = NOW.get()
            if now is None or metadata is None:
                return forward(layer, q, k, v, cache, metadata, *args, **kwargs)
            now.before(self, q, k, v, cache)
            result = forward(layer, q, k, v, cache, metadata, *args, **kwargs)
            output = kwargs.get("output")
            made: Tensor = output if output is not None else result
            now.behind(self, q, k, v, cache, made)
            if self.feeds is not None:
                now.tap(self.feeds, made.view(made.shape[0], -1), None)
            return result

        impl.forward = tapped

    def before(self, now: "ForwardPass", q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> None:
        """The op is about to run: blocks that wait for what it receives run on."""
        self._put_back(now, cache)
        self._attend.passed = now.clock
        for name, operand in zip("qkv", (q, k, v), strict=True):
            if isinstance(cast("Any", operand), Tensor):  # a layer that attends to another one's keys may get none
                now.host.keep(Site(self.path, Port.ATTEND, name), operand, None)
        for worker in now.doing_again(self._attend):
            view = self._views[worker] = self._view(now, worker, (q, k, v), cache)
            now.do_again(worker, self._attend, view)
            if view.edited & {"k", "v"}:
                self._put_again(now.rows_of(worker), k, v, cache)
        if not self._attend.workers:
            return
        workers, self._attend.workers = now.arrived(self._attend), []
        for worker in workers:
            with now.guarded(worker):
                view = self._views[worker] = self._view(now, worker, (q, k, v), cache)
                worker.resume(view)
                if view.edited & {"k", "v"}:
                    self._put_again(now.rows_of(worker), k, v, cache)

    def behind(self, now: "ForwardPass", q: Tensor, k: Tensor, v: Tensor, cache: Tensor, output: Tensor) -> None:
        """The op has run: blocks that wait for what it computed, or for what it made, run on."""
        heads = output.view(-1, self.facts.num_heads, self.facts.d_value)
        now.host.keep(self._after[-1].site, heads, None)

        def viewed(worker: Worker, slot: Slot) -> PagedAttention:
            if worker not in self._views:
                self._views[worker] = self._view(now, worker, (q, k, v), cache)
            view = self._views[worker]
            view.outputs = heads[now.rows_of(worker)][None]
            if slot is self._after[-1]:
                _overwrite(view)
            return view

        for slot in self._after:
            slot.passed = now.clock
            for worker in now.doing_again(slot):
                now.do_again(worker, slot, viewed(worker, slot))
            workers, slot.workers = now.arrived(slot), []
            for worker in workers:
                with now.guarded(worker):
                    worker.resume(viewed(worker, slot))
        views, self._views = self._views, {}
        for worker, view in views.items():
            with now.guarded(worker):
                view.outputs = heads[now.rows_of(worker)][None]
                _overwrite(view)

    def keep(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values in these blocks, [token, kv_head, width] each, on the CPU."""
        assert isinstance(self.reader, CacheReader)
        keys, values = self.reader.gather(self.layer.kv_cache, blocks, length, left_behind(self.facts, length))
        return keys.transpose(0, 1).cpu(), values.transpose(0, 1).cpu()

    @property
    def keeps(self) -> bool:
        """Whether this layer has keys of its own that can be read."""
        shared = getattr(self.layer, "kv_sharing_target_layer_name", None)  # Gemma 3n and 4; None elsewhere
        return isinstance(self.reader, CacheReader) and shared is None

    def _put_back(self, now: "ForwardPass", cache: Tensor) -> None:
        """Rows that are computed again after a preemption get the keys and values that they had."""
        for placed in now.put_back:
            kept = placed.companion.kept.get(self.path)
            if kept is None or placed.again.start == placed.again.stop:
                continue
            with placed.companion.guarded():
                here = slice(placed.position, placed.position + placed.again.stop - placed.again.start)
                keys, values = (half[here].to(cache.device) for half in kept)
                there = ~keys.flatten(1).isnan().all(1)  # where no window had dropped the position
                there[max(0, left_behind(self.facts, len(kept[0])) - here.start) :] = True  # a block's own NaN
                slots = self._slots(placed.again)
                self.layer.impl.do_kv_cache_update(self.layer, keys[there], values[there], cache, slots[there])

    def _view(
        self, now: "ForwardPass", worker: Worker, qkv: tuple[Tensor, Tensor, Tensor], cache: Tensor
    ) -> PagedAttention:
        facts, rows = self.facts, now.rows_of(worker)
        widths = (
            (facts.num_heads, facts.d_head),
            (facts.num_kv_heads, facts.d_head),
            (facts.num_kv_heads, facts.d_value),
        )
        q, k, v = (each.view(-1, *shape)[rows] for each, shape in zip(qkv, widths, strict=True))

        def gather() -> tuple[Tensor, Tensor]:
            assert isinstance(self.reader, CacheReader)
            blocks, length = self._blocks(self.name, now, worker)
            return self.reader.gather(cache, blocks, length, left_behind(facts, length - k.shape[0]))

        def before(site: Site) -> Tensor | None:
            kept = now.kept.get(site)
            return None if kept is None else kept[rows]

        refusal = self.reader if isinstance(self.reader, str) else None
        return PagedAttention(facts, worker.rows, worker.step, (q, k, v), gather, refusal, before)

    def _put_again(self, rows: slice, k: Tensor, v: Tensor, cache: Tensor) -> None:
        """Edited keys and values go into the cache as the unedited ones did."""
        slots = self._slots(rows)
        shape = (-1, self.facts.num_kv_heads)
        keys, values = k.view(*shape, self.facts.d_head)[rows], v.view(*shape, self.facts.d_value)[rows]
        self.layer.impl.do_kv_cache_update(self.layer, keys.contiguous(), values.contiguous(), cache, slots)

    def _slots(self, rows: slice) -> Tensor:
        """Where in the cache the keys of rows of this pass go."""
        return self._slot_mapping(self.name)[rows]


def _overwrite(view: PagedAttention) -> None:
    """Rows whose scores or pattern were edited are written over what the op returned, once."""
    patches = view.patches
    if patches is not None and view.outputs is not None:
        with torch.no_grad():
            patches.overwrite(view.outputs)
        view.forget_patches()
