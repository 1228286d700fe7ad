"""Raw places of an inline engine that is made of modules, and the virtual child `attn` of its attention.

Modules are gated only while a block runs that names a raw place; it runs alone, so nothing is cut out of a batch.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from jackfield.engines.inline import InlineChannel, InlineRun, Passing
from jackfield.engines.transformers.channels import RawChannel, same_nest
from jackfield.engines.transformers.gate import Gate
from jackfield.interleave.channel import WHOLE, Channel, Selection
from jackfield.interleave.worker import Worker
from jackfield.values.attention import AttentionValues
from jackfield.values.tree import named_modules

OPERANDS = (
    AttentionValues.attention_queries,
    AttentionValues.attention_keys,
    AttentionValues.attention_values,
)


@contextmanager
def gated(root: nn.Module, run: InlineRun) -> Generator[None]:
    """A gate at every module, gone afterwards."""
    gates = [Gate(module, path, run.interleaver.slots) for path, module in named_modules(root).items()]
    try:
        for gate in gates:
            gate.put_up(run.interleaver)
        yield
    finally:
        for gate in gates:
            gate.close()


def raw_place(path: str, port: str, layer: int | None) -> Channel:
    """The channel of a module's port; `layer` is the one whose attention op `path` names, where it names one."""
    if layer is None:
        return RawChannel(path, port)
    return OpOutputChannel(path, layer) if port == "output" else OpInputsChannel(path, layer)


class OpInputsChannel(Channel):
    """((q, k, v), kwargs) of an attention op, each [token, heads * width]; there are no kwargs."""

    def __init__(self, path: str, layer: int) -> None:
        self.operands = [InlineChannel(value, layer) for value in OPERANDS]
        self.name = self.memory = f"{path}.inputs"
        self.site, self.writable = self.operands[0].site, True

    def read(self, passing: Passing, worker: Worker, selection: Selection) -> Any:
        return tuple(_flat(operand.read(passing, worker, WHOLE)) for operand in self.operands), {}

    def write(self, passing: Passing, worker: Worker, selection: Selection, value: Any) -> None:
        for operand, new in zip(self.operands, value[0], strict=True):
            old = operand.read(passing, worker, WHOLE)
            heads = new.reshape(new.shape[0], old.shape[1], -1).transpose(0, 1)[None]
            if not torch.equal(heads, old):
                operand.write(passing, worker, WHOLE, heads)

    def check(self, wanted: Any, value: Any) -> None:
        same_nest(self, wanted[0], value[0])


class OpOutputChannel(InlineChannel):
    """The head outputs as [token, heads * d_value]."""

    def __init__(self, path: str, layer: int) -> None:
        super().__init__(AttentionValues.attention_head_outputs, layer)
        self.name = f"{path}.output"

    def read(self, passing: Passing, worker: Worker, selection: Selection) -> Tensor:
        return super().read(passing, worker, WHOLE)[0].flatten(1)

    def write(self, passing: Passing, worker: Worker, selection: Selection, value: Tensor) -> None:
        old = super().read(passing, worker, WHOLE)
        super().write(passing, worker, WHOLE, value.view_as(old))


def _flat(heads: Tensor) -> Tensor:
    return heads[0].transpose(0, 1).flatten(1)
