"""Where each request's rows are in a pass of vLLM's first model runner, and the blocks of its cache.

All that depends on a runner is here. Everything else asks for rows by absolute position.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Row = tuple[str, int, int, int]
"""A request's id, its first row, how many, and the absolute position of the first."""


class FirstRunner:
    """vLLM's V1 runner: `GPUModelRunner` of `v1.worker.gpu_model_runner`, and the CPU's, which is made of it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._groups: Mapping[str, int] | None = None

    def rows(self) -> Sequence[Row]:
        """The rows of the pass that has been prepared, in the batch's order."""
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np
        computed = batch.num_computed_tokens_cpu
        return [
            (request_id, int(starts[i]), int(starts[i + 1] - starts[i]), int(computed[i]))
            for i, request_id in enumerate(batch.req_ids)
        ]

    def blocks(self, layer: str, index: int) -> list[int]:
        """The blocks that hold a layer's keys of the request at this place in the batch, in order of position."""
        if self._groups is None:
            groups = self._runner.kv_cache_config.kv_cache_groups
            self._groups = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        table = self._runner.input_batch.block_table[self._groups[layer]]
        return table.get_numpy_array()[index].tolist()

    def input_ids(self) -> Tensor:
        """The token ids of the pass [row]."""
        return self._runner.input_ids.gpu
