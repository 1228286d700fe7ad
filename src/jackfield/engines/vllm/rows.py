"""vLLM's two model runners: where each request's rows are in a pass, the blocks of its cache, how a pass is run.

All that depends on a runner is here. Everything else asks for rows by absolute position.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from jackfield.engines.vllm.foreign import foreign
from jackfield.engines.vllm.graphs import NOTHING, Armed, Graphs, Stats, TableLaunch
from jackfield.interleave.site import Site

Watch = Callable[[Callable[[], Any], Callable[[], Any], int], Any]
"""Runs a replay as a watched pass over so many rows; the second runs the same pass again, with every tap alive."""
Row = tuple[str, int, int, int]
"""A request's id, its first row, how many, and the absolute position of the first."""


Answer = Callable[..., Any]
"""What stands for a function: it is called with it, and with what it was called with."""


class Answering:
    """A function of a module that all engines of a process call, each of which answers calls about its own."""

    def __init__(self, function: Callable[..., Any], place: int) -> None:
        self.function, self.own, self._place = function, list[tuple[Callable[[], Any], Answer]](), place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for key, answer in self.own:
            if args[self._place] is key():
                return answer(self.function, *args, **kwargs)
        return self.function(*args, **kwargs)


class Runner(ABC):
    """A model runner, and how its next pass is to be run.

    `traced`: taps are wanted, so a graph must have them, cut at the `armed` sites. `eager`: no CUDA graph will do.
    `uncompiled`: nor will compiled code.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._groups: Mapping[str, int] | None = None
        self.traced = self.eager = self.uncompiled = False
        self.armed = self.taken = NOTHING  # what the next pass wants, and what its graph has
        self.in_pieces = False  # whether its graphs are those between attention ops
        self.unproven = False  # whether these were captured for it, and have not been replayed before
        self.launch: TableLaunch | None = None
        self.stats = Stats()
        self._undone: list[Callable[[], None]] = []

    def close(self) -> None:
        """Puts back what was wrapped of vLLM's modules, which outlive an engine."""
        while self._undone:
            self._undone.pop()()

    def scheduled(self) -> None:  # noqa: B027 - what most runners count elsewhere
        """A pass is about to run, as it was said to."""

    def arm(self, armed: Armed) -> None:  # noqa: B027 - what runners without graphs for blocks have nothing to do for
        """Has a graph of every batch size ready for `armed`."""

    def taking(self) -> AbstractContextManager[None]:
        """While it is open, a pass in pieces takes the graphs of `taken`."""
        return nullcontext()

    def distrust_pieces(self) -> None:  # noqa: B027 - where there are none
        """Passes in pieces were not right: there are none any more."""

    @abstractmethod
    def settle_graphs(self, watch: Watch) -> None:
        """To be called before graphs are captured. `watch` runs a replay as a watched pass."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The rows of the pass that has been prepared, in the batch's order."""

    @abstractmethod
    def blocks(self, layer: str, index: int) -> Tensor:
        """The blocks that hold a layer's keys of the request at this place in the batch, in order of position.

        [block] on the device, which nobody waits for; behind those that are in use are others.
        """

    @abstractmethod
    def held(self, layer: str, request_id: str, places: slice = slice(None)) -> Tensor:
        """Those of a request by its id, between two passes, and some of them. None of one that has no blocks."""

    @abstractmethod
    def block_size(self, layer: str) -> int:
        """How many tokens such a block holds."""

    @abstractmethod
    def input_ids(self) -> Tensor:
        """The token ids of the pass [row]."""

    @abstractmethod
    def slot_mapping(self, layer: str) -> Tensor:
        """Where in a layer's cache the keys of each row go [row]."""

    def group(self, layer: str) -> int:
        """Layers of one group have the same blocks."""
        if self._groups is None:
            groups = self._runner.kv_cache_config.kv_cache_groups
            self._groups = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        return self._groups[layer]

    def _context_of(self, module: Any) -> None:
        """Has `uncompiled` passes say so in their forward context: both runners take it from their module's name."""

        def answer(made: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return made(*args, **(kwargs | {"skip_compiled": True} if self.uncompiled else kwargs))

        self._answer(module, "set_forward_context", 1, lambda: self._runner.vllm_config, answer)

    def _answer(self, module: Any, name: str, place: int, key: Callable[[], Any], answer: Answer) -> None:
        """Has `answer` stand for a module's function in calls whose argument at `place` is what `key` gives."""
        now = getattr(module, name)
        shared = now if isinstance(now, Answering) else Answering(now, place)
        setattr(module, name, shared)
        entry = key, answer
        shared.own.append(entry)

        def undo() -> None:
            shared.own.remove(entry)
            if not shared.own:
                setattr(module, name, shared.function)

        self._undone.append(undo)


class FirstRunner(Runner):
    """The V1 runner: `v1.worker.gpu_model_runner`, and the CPU's, which is made of it."""

    def __init__(self, runner: Any) -> None:
        gpu_model_runner = import_module("vllm.v1.worker.gpu_model_runner")

        super().__init__(runner)
        self._context_of(gpu_model_runner)
        dispatch = runner.cudagraph_dispatcher.dispatch

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            none = foreign("vllm.config", "CUDAGraphMode").NONE
            return dispatch(*args, **(kwargs | {"valid_modes": {none}} if self.traced else kwargs))

        runner.cudagraph_dispatcher.dispatch = dispatched

    def scheduled(self) -> None:
        self.stats.count(traced=self.traced)

    def settle_graphs(self, watch: Watch) -> None:
        """Nothing: a traced pass of this runner has no graph."""

    def rows(self) -> Sequence[Row]:
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np
        computed = batch.num_computed_tokens_cpu
        return [
            (request_id, int(starts[i]), int(starts[i + 1] - starts[i]), int(computed[i]))
            for i, request_id in enumerate(batch.req_ids)
        ]

    def blocks(self, layer: str, index: int) -> Tensor:
        table = self._runner.input_batch.block_table[self.group(layer)]
        return self._sent(torch.tensor(table.get_numpy_array()[index], dtype=torch.long))

    def held(self, layer: str, request_id: str, places: slice = slice(None)) -> Tensor:
        group, request = self.group(layer), self._runner.requests.get(request_id)
        cut = getattr(self._runner.input_batch.block_table[group], "blocks_per_kv_block", 1)  # not in 0.32 and later
        whole: list[int] = [] if request is None else request.block_ids[group]
        blocks = [block * cut + part for block in whole for part in range(cut)]
        return self._sent(torch.tensor(blocks[places], dtype=torch.long))

    def _sent(self, blocks: Tensor) -> Tensor:
        device: torch.device = self._runner.device
        return blocks.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else blocks

    def block_size(self, layer: str) -> int:
        return self._runner.input_batch.block_table[self.group(layer)].block_size

    def input_ids(self) -> Tensor:
        return self._runner.input_ids.gpu

    def slot_mapping(self, layer: str) -> Tensor:
        return foreign("vllm.forward_context", "get_forward_context")().slot_mapping[layer]


class SecondRunner(Runner):
    """The V2 runner: `v1.worker.gpu.model_runner`, the default on GPUs, and the CPU's made of it."""

    def __init__(self, runner: Any, sites: Mapping[int, Site]) -> None:
        model_runner = import_module("vllm.v1.worker.gpu.model_runner")

        super().__init__(runner)
        self._sites = sites
        self._graphs: Graphs | None = None
        self._metadata: Any = None
        self._batch: Any = None
        self._tables: Sequence[Tensor] = ()
        self._slot_mappings: Sequence[Tensor] = ()
        self._context_of(model_runner)
        prepare_inputs, prepare_attention = runner.prepare_inputs, runner.prepare_attn

        def prepared_inputs(*args: Any, **kwargs: Any) -> Any:
            self._batch = prepare_inputs(*args, **kwargs)
            return self._batch

        def prepared_attention(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare_attention(*args, **kwargs)
            self._tables, self._slot_mappings = prepared
            return prepared

        def dispatched(dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.in_pieces = self.unproven = False
            chosen = dispatch(*args, **(kwargs | {"need_eager": True} if self._graphless() else kwargs))
            if (taken := self._armed(chosen)) is not None:
                return taken
            self.stats.count(traced=True)
            return dispatch(*args, **(kwargs | {"need_eager": True}))

        prepare_metadata = runner.model_state.prepare_attn if hasattr(runner, "model_state") else None

        def prepared_metadata(*args: Any, **kwargs: Any) -> Any:
            assert prepare_metadata is not None
            self._metadata = prepare_metadata(*args, **kwargs)
            return self._metadata

        if prepare_metadata is not None:
            runner.model_state.prepare_attn = prepared_metadata
        runner.prepare_inputs, runner.prepare_attn = prepared_inputs, prepared_attention
        # The one name through which every pass of this module chooses its graph (vLLM 0.25 to 0.33).
        self._answer(model_runner, "dispatch_cg_and_sync_dp", 0, lambda: runner.cudagraph_manager, dispatched)

    def settle_graphs(self, watch: Watch) -> None:
        manager = self._runner.cudagraph_manager
        self._graphs = Graphs(manager, self._sites, self.stats, self._pieces)
        self._graphs.launch = self.launch
        replay = manager.run_fullgraph

        def run_fullgraph(descriptor: Any) -> Any:
            def armed() -> Any:
                with self.taking():
                    return replay(descriptor)

            return watch(armed, self._again, descriptor.num_tokens) if self.traced else replay(descriptor)

        manager.run_fullgraph = run_fullgraph

    def arm(self, armed: Armed) -> None:
        if self._graphs is not None and self._graphs.ready and armed:
            self._graphs.arm(armed)

    def taking(self) -> AbstractContextManager[None]:
        return self._graphs.taking(self.taken) if self.taken and self._graphs is not None else nullcontext()

    def distrust_pieces(self) -> None:
        if self._graphs is not None:
            self._graphs.distrust_pieces()

    def _pieces(self) -> list[Any]:
        """What keeps the graphs of this model's compiled pieces; other engines of this process have their own."""
        made = foreign("vllm.compilation.cuda_graph", "CUDAGraphWrapper")._all_instances
        piecewise, config = foreign("vllm.config", "CUDAGraphMode").PIECEWISE, self._runner.vllm_config
        return [each for each in made if each.vllm_config is config and each.runtime_mode == piecewise]

    def _graphless(self) -> bool:
        """Whether a traced pass can have no graph: ranks of data parallelism settle theirs together, and beforehand."""
        is_alone = self._runner.vllm_config.parallel_config.data_parallel_size == 1
        return self.traced and (self.eager or self._graphs is None or not self._graphs.ready or not is_alone)

    def _armed(self, chosen: Any) -> Any:
        """The choice, its graph captured with the armed sites; None where a graph that was chosen has no taps."""
        modes, descriptor = foreign("vllm.config", "CUDAGraphMode"), chosen[0]
        if not self.traced or descriptor.cg_mode == modes.NONE:
            self.stats.count(traced=self.traced)
            return chosen
        assert self._graphs is not None
        self.in_pieces = descriptor.cg_mode != modes.FULL
        if self.in_pieces and not self._graphs.takes_pieces(descriptor, self.armed):
            self.in_pieces = False
            return None
        captured = self.stats.captured
        self.taken = self._graphs.ensure(descriptor, self.armed) if self.armed else NOTHING
        self.unproven = self.in_pieces and self.stats.captured > captured
        self.stats.armed += 1
        self.stats.tabled += bool(self.taken.tables)
        return chosen

    def _again(self) -> Any:
        """The pass that was prepared, without graphs: its inputs are still in the runner's buffers."""
        runner, batch = self._runner, self._batch
        self.stats.again += 1
        given = {"input_ids": batch.input_ids, "positions": batch.positions, "inputs_embeds": None}
        given |= {"intermediate_tensors": None, **runner.model_state.prepare_inputs(batch, runner.req_states)}
        by_layer = foreign("vllm.v1.worker.gpu.attn_utils", "build_slot_mappings_by_layer")
        with foreign("vllm.forward_context", "set_forward_context")(
            self._metadata,
            runner.vllm_config,
            num_tokens=batch.num_tokens_after_padding,
            cudagraph_runtime_mode=foreign("vllm.config", "CUDAGraphMode").NONE,
            slot_mapping=by_layer(self._slot_mappings, runner.kv_cache_config),
        ):
            return runner.model(**given)

    def rows(self) -> Sequence[Row]:
        batch = self._batch
        starts, computed = batch.query_start_loc_np, batch.num_computed_tokens_np
        return [
            (request_id, int(starts[i]), int(starts[i + 1] - starts[i]), int(computed[i]))
            for i, request_id in enumerate(batch.req_ids)
        ]

    def blocks(self, layer: str, index: int) -> Tensor:
        return self._tables[self.group(layer)][index].long()

    def held(self, layer: str, request_id: str, places: slice = slice(None)) -> Tensor:
        index, tables = self._runner.req_states.req_id_to_index.get(request_id), self._runner.block_tables
        group = self.group(layer)
        row = tables.block_tables[group].gpu[0 if index is None else index].long()
        return row[: 0 if index is None else int(tables.num_blocks.np[group, index])][places]

    def block_size(self, layer: str) -> int:
        return self._runner.block_tables.block_sizes[self.group(layer)]

    def input_ids(self) -> Tensor:
        return self._batch.input_ids

    def slot_mapping(self, layer: str) -> Tensor:
        return self._slot_mappings[self.group(layer)]


SECOND: Final = "vllm.v1.worker.gpu.model_runner"


def runner_of(runner: Any, sites: Mapping[int, Site]) -> Runner:
    """The adapter for a runner, by the module that its class comes from; `sites` are the taps, by number."""
    is_second = any(base.__module__ == SECOND for base in type(runner).__mro__)
    return SecondRunner(runner, sites) if is_second else FirstRunner(runner)
