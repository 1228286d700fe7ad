"""The engine that blocks have in a worker process: it serves values out of the passes of the runner beside it."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from jackfield.engines.engine import Engine, Outcome, Request
from jackfield.engines.vllm.attention import op_facts
from jackfield.engines.vllm.cache import CacheReader, probe
from jackfield.engines.vllm.cleaning import Cached, Cleaning
from jackfield.engines.vllm.describing import Describer
from jackfield.engines.vllm.description import Description
from jackfield.engines.vllm.direct import Fed, candidates, fed_directly
from jackfield.engines.vllm.foreign import foreign
from jackfield.engines.vllm.forward_pass import ForwardPass
from jackfield.engines.vllm.graphs import Armed
from jackfield.engines.vllm.host import Host
from jackfield.engines.vllm.op_tap import OpTap
from jackfield.engines.vllm.parts import Ranks
from jackfield.engines.vllm.raw import Gates, RawChannel
from jackfield.engines.vllm.raw_parts import RawJoint
from jackfield.engines.vllm.rows import runner_of
from jackfield.engines.vllm.seen import Tolerance
from jackfield.engines.vllm.served import Served, refuse_derivatives
from jackfield.engines.vllm.shipping import shipped
from jackfield.engines.vllm.structure import is_listened_to, put_taps, read_structure
from jackfield.engines.vllm.tables.buffers import Buffers, none_of
from jackfield.engines.vllm.tables.program import Places
from jackfield.engines.vllm.tables.tables import Tables
from jackfield.engines.vllm.taps import NOW, named, tap_inputs
from jackfield.engines.vllm.untraceable import untraceable
from jackfield.errors import TracingError, Unavailable
from jackfield.interleave.channel import Channel
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Worker
from jackfield.interventions.places import Place


class WorkerEngine(Served):
    """Made when the model is loaded, before it first runs: taps are put then, and compiled along."""

    def __init__(self, runner: Any, vllm_config: Any, front: Callable[[Engine], Any]) -> None:
        self.runner, self.vllm_config = runner, vllm_config
        self.loaded: nn.Module = runner.get_model()
        self.tree = self.loaded
        # By the first of several paths, as `structure` has it: Gemma 3n's layers stand in two lists.
        paths = {id(module): path for path, module in reversed(list(named(self.loaded).items()))}
        context: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
        self.ops = {name: layer for name, layer in context.items() if id(layer) in paths and hasattr(layer, "impl")}
        self._stateful = [
            f"{name}: its state is no list of keys"
            for name, layer in context.items()
            if id(layer) in paths and name not in self.ops and hasattr(layer, "kv_cache")  # recurrent layers
        ]
        self._unkept: str | None = None  # why a preempted request cannot be as if it had not been
        self.structure = read_structure(self.loaded, self.ops)
        self.ranks = Ranks()
        self._fed = candidates(self.structure.blocks)
        taps = put_taps(self.loaded, self.structure, later=[each.projection for each in self._fed])
        self.host = Host(taps.all, self.ranks, vllm_config.model_config.seed)
        self.rows = runner_of(runner, {number: slot.site for number, slot in enumerate(self.host.numbered)})
        self.compute_logits: Callable[..., Any] = cast("Any", self.loaded).compute_logits
        if self.ranks.size == 1:
            self.host.tables = Tables([slot.site for slot in self.host.numbered], torch.device(runner.device))
            self.rows.launch = self._launch
        self._real = False  # whether the pass that goes on is one of the scheduler's, and not a warm-up or a capture
        self._gates = Gates(self.loaded, self.host)
        self._raw: dict[tuple[str, str], RawChannel] = {}
        self._op_taps = [
            OpTap(name, layer, paths[id(layer)], op_facts(layer), self.host.slots, self._blocks, self.rows.slot_mapping)
            for name, layer in self.ops.items()
            if is_listened_to(layer)
        ]
        for tap in self._op_taps:
            tap.put_up()
        self._cleaning = Cleaning((), self.rows)  # until there are caches
        self._wrap_runner()
        self.host.server, self.host.model = self, front(self)

    def read_caches(self) -> None:
        """Finds how each layer's paged cache is read; to be called when there are caches."""
        for tap in self._op_taps:
            tap.reader = probe(tap.layer, tap.layer.kv_cache)
        unread = (f"{tap.path}: {tap.reader}" for tap in self._op_taps if isinstance(tap.reader, str))
        self._unkept = next(iter((*unread, *self._stateful)), None)
        self._cleaning = Cleaning(list(self._cached()), self.rows)

    def _cached(self) -> Iterator[Cached]:
        taps = {tap.name: tap for tap in self._op_taps}
        for name, layer in self.ops.items():
            shared = getattr(layer, "kv_sharing_target_layer_name", None)  # Gemma 3n and 4; None elsewhere
            if shared is None and isinstance(cast("Any", getattr(layer, "kv_cache", None)), Tensor):
                reader = taps[name].reader if name in taps else None
                axis = reader.block_axis if isinstance(reader, CacheReader) else 0  # all that are not read, since 0.23
                yield Cached(name, layer, taps[name].facts.window if name in taps else None, axis)

    # -- the runner

    def arrive(self, scheduler_output: Any) -> None:
        """A step has been scheduled: traced requests that are new begin, and how the pass is run is settled."""
        for request_id in scheduler_output.preempted_req_ids or ():
            self._keep(request_id)
        self._cleaning.arrive(scheduler_output, self.host.is_traced, self.host.has_edited)
        self.host.ended(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            if (sent := shipped(new.sampling_params)) is not None:
                self.host.begin(new.req_id, *sent)
        watched = self.host.watching_for(scheduler_output.num_scheduled_tokens)
        rows = self.rows
        tables, scheduled = self.host.tables, scheduler_output.num_scheduled_tokens
        tabled = frozenset[Site]() if tables is None else tables.wanted(scheduled)
        keeps_seen = tables is not None and tables.has(scheduled)
        rows.traced = bool(watched) or self.host.recorder is not None or bool(tabled) or keeps_seen
        probed = self.host.recorder
        rows.uncompiled = any(companion.raw for companion in watched) or (probed is not None and probed.uncompiled)
        rows.eager = rows.uncompiled or not all(companion.is_known for companion in watched)
        rows.eager |= self.host.recorder is not None or any(companion.names_early for companion in watched)
        rows.eager |= any(companion.kept for companion in watched)  # a graph would not put them back
        rows.eager |= self.ranks.size > 1  # graphs that are cut were not shown to be right on several ranks
        version = 0 if tables is None else tables.columns.version
        rows.armed = Armed(self.host.armed_for(scheduled), tabled, version if tabled else 0)
        if tables is not None and tables.buffers is not None and tabled:
            tables.buffers.settle(self._most_rows)
        self._real = scheduler_output.total_num_scheduled_tokens > 0
        if self._real:
            rows.scheduled()

    def settle(self) -> Mapping[str, str]:
        """The step is over: requests that end by their blocks, and why."""
        self._real = False
        return self.host.settle()

    def _keep(self, request_id: str) -> None:
        """A request has lost its place in the caches, which still hold its keys until this step runs."""
        companion = self.host.companions.get(request_id)
        if companion is None or companion.kept:
            return
        with companion.guarded():
            if self._unkept is not None and companion.worker.wrote:
                raise Unavailable(
                    f"This request lost its place in the cache after its block had edited something, and what it was "
                    f"edited to cannot be kept ({self._unkept}). Give the cache more room (gpu_memory_utilization), or "
                    "run fewer requests at a time (max_num_seqs)."
                )
            companion.kept = {
                tap.path: tap.keep(self.rows.held(tap.name, request_id), companion.seen)
                for tap in self._op_taps
                if tap.keeps
            }

    def stop(self) -> None:
        """The worker is shut down: nothing of vLLM's that outlives it stays wrapped."""
        self.rows.close()

    def arm(self, places: Sequence[Place]) -> None:
        """Has graphs ready; nothing where passes have none for blocks."""
        named = [place for place in places if not place.value.each_step]
        self.rows.arm(Armed(self.host.cuts(self.channel(place.name, place.layer, None).site for place in named)))

    def settle_graphs(self) -> None:
        """Graphs are about to be captured."""
        self.rows.settle_graphs(self._watch)

    def _watch(self, replay: Callable[[], Any], again: Callable[[], Any], total: int) -> Any:
        """A replay as a watched pass; run again where a block waits for what the graph was not cut at."""
        with self.host.watching(self.rows.rows(), total):
            hidden = self._replayed(replay, again, total)
            self.host.final_norm(hidden)
        return hidden

    def _replayed(self, replay: Callable[[], Any], again: Callable[[], Any], total: int) -> Any:
        now = self.host.now
        if self.rows.taken.tables:
            tabled = None if now is None else now.tabled
            self._buffers.say(none_of(total) if tabled is None else tabled.slots)
        hidden = replay()
        if now is not None and now.missed(self.rows.taken.tables):
            now.begin_again()
            hidden = again()
        return hidden

    def _replayed_in_pieces(self, run: Callable[[], Any]) -> Any:
        """A pass whose graphs are those between attention ops; the ops' own taps are alive.

        The first pass through new graphs is run once more without, and that is the one that counts.
        """
        now = self.host.now
        if now is None:
            return run()

        def replay() -> Any:
            with self.rows.taking(), now.in_graphs():
                return run()

        def again() -> Any:
            self.rows.stats.again += 1
            return _in_context(run, cudagraph_runtime_mode=foreign("vllm.config", "CUDAGraphMode").NONE)

        hidden = self._replayed(replay, again, now.total)
        if not self.rows.unproven or now.is_again or not isinstance(hidden, Tensor):
            return hidden
        count = sum(each[2] for each in self.rows.rows())  # padding comes behind
        replayed = hidden[:count].float().clone()
        now.begin_again()
        hidden = again()
        if not Tolerance.of(hidden.dtype).same(replayed, hidden[:count].float()):
            self.rows.distrust_pieces()
        return hidden

    def _launch(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        """What a site of the tables does in a graph."""
        self._buffers.launch_static(site, x, residual)

    @property
    def _buffers(self) -> Buffers:
        assert self.host.tables is not None
        assert self.host.tables.buffers is not None
        return self.host.tables.buffers

    @property
    def _most_rows(self) -> int:
        """Of the largest CUDA graph."""
        return self.vllm_config.compilation_config.max_cudagraph_capture_size or 0

    def _wrap_runner(self) -> None:
        forward, compute_logits = self.loaded.forward, self.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(forward, *args, **kwargs)
            if self._fed:
                self._settle_fed(run)
            if not self._real or self.host.now is not None or NOW.get() is not None:
                return run()  # a warm-up, or a pass that is watched, or captured, already
            given = next(each for each in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None)
            with self.host.watching(self.rows.rows(), given.shape[0]), self._gates.put_up(self.rows.uncompiled):
                hidden = self._replayed_in_pieces(run) if self.rows.in_pieces else run()
                self.host.final_norm(hidden)
            return hidden

        def with_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            self.host.logits(logits)
            return logits

        loaded: Any = self.loaded  # torch types a module's attributes as tensors and modules
        loaded.forward, loaded.compute_logits = watched, with_logits

    def _settle_fed(self, run: Callable[[], object]) -> None:
        """The first pass: projections that no op feeds get their taps. One that is a request's shows none."""
        fed, self._fed = self._fed, []
        taps = {tap.path: tap for tap in self._op_taps}
        impls = {path: tap.layer.impl for path, tap in taps.items()}
        uncompiled = functools.partial(_in_context, run, skip_compiled=True)
        direct = frozenset[Fed]() if self._real else fed_directly(fed, named(self.loaded), impls, uncompiled)
        numbers = {slot.site: number for number, slot in enumerate(self.host.numbered)}
        for each in fed:
            number = numbers[Site(each.projection, Port.INPUT)]
            if each in direct:
                taps[each.op].feeds = number
            else:
                tap_inputs(self.loaded.get_submodule(each.projection), number)

    def _blocks(self, layer: str, now: ForwardPass, worker: Worker) -> tuple[Tensor, int]:
        placed = now.of[worker]
        return self.rows.blocks(layer, placed.index), placed.position + placed.count

    # -- what is served

    def describe(self) -> Description:
        """What the probe has shown. UnsupportedModel where a tap was never heard of."""
        recorder, plain = self.host.recorder, self.host.plain
        assert recorder is not None
        describer = Describer(self, recorder.seen)
        describer.refuse_changed(recorder.seen, plain.seen if plain is not None else recorder.seen)
        self.host.order = {each.site: place for place, each in enumerate(recorder.seen)}
        for tap in self._op_taps:
            place = self.host.order.get(Site(tap.path, Port.HEADS))
            ports = (Port.ATTEND, Port.SCORES, Port.PATTERN)
            self.host.order |= {Site(tap.path, port): place for port in ports if place is not None}
        self.host.recorder = self.host.plain = None
        self.description = replace(describer.description(), untraceable=self._untraceable())
        self.channels, self.host.early = describer.channels(), describer.early()
        if self.host.tables is not None:
            widths = {site: width for site, (width, dtype) in recorder.forms.items() if dtype == describer.dtype}
            taps = set(self.host.tables.sites)
            known = {site: width for site, width in widths.items() if site in taps}
            self.host.tables.known = Places(self.channels, known, describer.dtype)
        settings = self.runner.model_config
        self.facts, self.config = self.description.facts, settings.hf_config
        self.tokenizer = (
            None
            if settings.skip_tokenizer_init
            else foreign("vllm.tokenizers", "cached_tokenizer_from_config")(settings)
        )
        return self.description

    def _untraceable(self) -> str | None:
        """Why no block can run here: a setting, or a platform that gives the logits to one rank (none in 0.32)."""
        reason = untraceable(self.vllm_config)
        platform = foreign("vllm.platforms", "current_platform")
        if reason is None and self.ranks.size > 1 and not platform.use_all_gather():
            return f"tensor_parallel_size={self.ranks.size} gives the logits to one rank alone on this platform"
        return reason

    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        worker = Worker.current()  # none where the client asks
        refuse_derivatives(x)
        with nullcontext() if worker is None else worker.aside():
            rows = x.reshape(-1, x.shape[-1])
            if norm and self.structure.final_norms:
                rows = self.loaded.get_submodule(self.structure.final_norms[-1])(rows)
            projected = self.compute_logits(rows).view(*x.shape[:-1], -1)
            if not projected.is_inference():
                return projected
            with torch.inference_mode(False):  # elsewhere in the block, one that is born in it cannot be written to
                return projected.clone()

    def raw_channel(self, path: str, port: str) -> Channel:
        if (path, port) not in self._raw:
            self._raw[path, port] = RawChannel(path, port, RawJoint.of(self.ranks, self.loaded, path, port))
        return self._raw[path, port]

    def step_value(self, name: str, worker: Worker) -> Tensor:
        now = self.host.now
        assert now is not None
        ids: Tensor = self.rows.input_ids()
        return ids[now.rows_of(worker)].long()[None]

    # -- what a client does

    def admit(self, prompt_token_ids: Sequence[int], sampling: Any) -> NoReturn:
        raise TracingError("A trace cannot run inside a block: the model is busy with this one.")

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        raise TracingError("A trace cannot run inside a block: the model is busy with this one.")

    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        raise TracingError("A trace cannot run inside a block: the model is busy with this one.")

    def close(self) -> None:
        raise TracingError("A block cannot close its model.")


def _in_context(run: Callable[[], Any], **settings: Any) -> Any:
    """The same pass, in its forward context, with these of its settings."""
    context = foreign("vllm.forward_context", "get_forward_context")()
    held = {name: getattr(context, name) for name in settings}
    for name, value in settings.items():
        setattr(context, name, value)
    try:
        return run()
    finally:
        for name, value in held.items():
            setattr(context, name, value)
