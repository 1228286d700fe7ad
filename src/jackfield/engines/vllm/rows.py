"""vLLM's two model runners: where each request's rows are in a pass, the blocks of its cache, how a pass is run.

All that depends on a runner is here. Everything else asks for rows by absolute position.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

Row = tuple[str, int, int, int]
"""A request's id, its first row, how many, and the absolute position of the first."""


class Runner(ABC):
    """A model runner. `eager` has the next passes run without CUDA graphs, `uncompiled` without compiled code too."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._groups: Mapping[str, int] | None = None
        self.eager = self.uncompiled = False
        self._undone: list[Callable[[], None]] = []

    def close(self) -> None:
        """Puts back what was wrapped of vLLM's modules, which outlive an engine."""
        while self._undone:
            self._undone.pop()()

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The rows of the pass that has been prepared, in the batch's order."""

    @abstractmethod
    def blocks(self, layer: str, index: int) -> Sequence[int]:
        """The blocks that hold a layer's keys of the request at this place in the batch, in order of position."""

    @abstractmethod
    def input_ids(self) -> Tensor:
        """The token ids of the pass [row]."""

    def _group(self, layer: str) -> int:
        if self._groups is None:
            groups = self._runner.kv_cache_config.kv_cache_groups
            self._groups = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        return self._groups[layer]

    def _context_of(self, module: Any) -> None:
        """Has `uncompiled` passes say so in their forward context: both runners take it from their module's name."""
        made = module.set_forward_context

        def set_forward_context(*args: Any, **kwargs: Any) -> Any:
            return made(*args, **(kwargs | {"skip_compiled": True} if self.uncompiled else kwargs))

        self._put(module, "set_forward_context", set_forward_context)

    def _put(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        before = getattr(module, name)
        setattr(module, name, function)
        self._undone.append(lambda: setattr(module, name, before))


class FirstRunner(Runner):
    """The V1 runner: `v1.worker.gpu_model_runner`, and the CPU's, which is made of it."""

    def __init__(self, runner: Any) -> None:
        from vllm.v1.worker import gpu_model_runner

        super().__init__(runner)
        self._context_of(gpu_model_runner)
        dispatch = runner.cudagraph_dispatcher.dispatch

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            from vllm.config import CUDAGraphMode

            return dispatch(*args, **(kwargs | {"valid_modes": {CUDAGraphMode.NONE}} if self.eager else kwargs))

        runner.cudagraph_dispatcher.dispatch = dispatched

    def rows(self) -> Sequence[Row]:
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np
        computed = batch.num_computed_tokens_cpu
        return [
            (request_id, int(starts[i]), int(starts[i + 1] - starts[i]), int(computed[i]))
            for i, request_id in enumerate(batch.req_ids)
        ]

    def blocks(self, layer: str, index: int) -> Sequence[int]:
        table = self._runner.input_batch.block_table[self._group(layer)]
        return table.get_numpy_array()[index].tolist()

    def input_ids(self) -> Tensor:
        return self._runner.input_ids.gpu


class SecondRunner(Runner):
    """The V2 runner: `v1.worker.gpu.model_runner`, the default on GPUs, and the CPU's made of it."""

    def __init__(self, runner: Any) -> None:
        from vllm.v1.worker.gpu import model_runner

        super().__init__(runner)
        self._batch: Any = None
        self._tables: Sequence[Tensor] = ()
        self._context_of(model_runner)
        prepare_inputs, prepare_attention = runner.prepare_inputs, runner.prepare_attn
        dispatch = model_runner.dispatch_cg_and_sync_dp

        def prepared_inputs(*args: Any, **kwargs: Any) -> Any:
            self._batch = prepare_inputs(*args, **kwargs)
            return self._batch

        def prepared_attention(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare_attention(*args, **kwargs)
            self._tables = prepared[0]
            return prepared

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            return dispatch(*args, **(kwargs | {"need_eager": True} if self.eager else kwargs))

        runner.prepare_inputs, runner.prepare_attn = prepared_inputs, prepared_attention
        # The one name through which every pass of this module chooses its graph (vLLM 0.25 to 0.33).
        self._put(model_runner, "dispatch_cg_and_sync_dp", dispatched)

    def rows(self) -> Sequence[Row]:
        batch = self._batch
        starts, computed = batch.query_start_loc_np, batch.num_computed_tokens_np
        return [
            (request_id, int(starts[i]), int(starts[i + 1] - starts[i]), int(computed[i]))
            for i, request_id in enumerate(batch.req_ids)
        ]

    def blocks(self, layer: str, index: int) -> Sequence[int]:
        return self._tables[self._group(layer)][index].tolist()

    def input_ids(self) -> Tensor:
        return self._batch.input_ids


SECOND: Final = "vllm.v1.worker.gpu.model_runner"


def runner_of(runner: Any) -> Runner:
    """The adapter for a runner, by the module that its class comes from."""
    is_second = any(base.__module__ == SECOND for base in type(runner).__mro__)
    return SecondRunner(runner) if is_second else FirstRunner(runner)
