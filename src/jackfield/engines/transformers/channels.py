"""How each value is had at its site on this engine: cut out of a padded batch, given its shape, and put back.

What passes is of the worker's `waiting_step`. Its `step` is what the block reads next, and may be another already when
an edit goes back: a loop over steps that has ended leaves the block at step 0.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from jackfield.engines.transformers.attention_call import AttentionCall
from jackfield.engines.transformers.gate import Call
from jackfield.engines.transformers.heads import cut
from jackfield.errors import EditMismatch, Unavailable
from jackfield.interleave.channel import WHOLE, Channel, Selection
from jackfield.interleave.nest import private_copy
from jackfield.interleave.site import Port, Site
from jackfield.interleave.worker import Worker
from jackfield.values.anatomy import Formula, Projection

ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}  # of a row's largest entry; other dtypes round: 5e-2


class FormulaChannel(Channel):
    """A value of the stream, a sublayer or a norm: `factor * (tensor - minus)`, [1, token, width]."""

    def __init__(self, name: str, formula: Formula, *, writable: bool = True) -> None:
        self.name, self.memory = name, f"{formula.site}{'' if formula.stream is None else formula.stream}"
        self.site, self.formula, self.writable = formula.site, formula, writable

    def read(self, passing: Call, worker: Worker, selection: Selection) -> Tensor:
        rows = self._rows(passing, worker, self.site)
        if self.formula.minus is not None:
            rows = rows - self._rows(passing, worker, self.formula.minus)
        if self.formula.factor != 1.0:
            rows = rows * self.formula.factor
        return rows.clone() if selection.tokens is None else rows[:, list(selection.tokens)].clone()

    def write(self, passing: Call, worker: Worker, selection: Selection, value: Tensor) -> None:
        rows = self._rows(passing, worker, self.site)
        if self.formula.factor != 1.0:
            value = value / self.formula.factor
        tokens = list(selection.tokens) if selection.tokens is not None else slice(None)
        if self.formula.minus is not None:
            value = value + self._rows(passing, worker, self.formula.minus)[:, tokens]
        rows[:, tokens] = value

    def _rows(self, passing: Call, worker: Worker, site: Site) -> Tensor:
        """A view of the request's rows: what is written to it, every holder of the tensor sees."""
        tensor = passing.tensor(site)
        rows, step = worker.rows, worker.waiting_step
        if self.formula.stream is not None:
            tensor = tensor[self.formula.stream]
        if self.formula.flat and tensor.ndim == 2:
            tensor = tensor.view(worker.batch_size, -1, tensor.shape[-1])
        if worker.batch_size == 1 and tensor.shape[0] == 1:
            return tensor  # all of it: nothing is padded
        return tensor[rows.index : rows.index + 1, rows.tokens(step)]


class HeadsFormulaChannel(FormulaChannel):
    """A value of the stream's shape whose width is heads side by side: [1, token, head, d_value]."""

    def __init__(self, name: str, formula: Formula, num_heads: int) -> None:
        super().__init__(name, formula)
        self.num_heads = num_heads

    def read(self, passing: Call, worker: Worker, selection: Selection) -> Tensor:
        heads = super().read(passing, worker, Selection(tokens=selection.tokens))
        heads = heads.reshape(*heads.shape[:2], self.num_heads, -1)
        return heads[:, :, list(selection.heads)].clone() if selection.heads is not None else heads

    def write(self, passing: Call, worker: Worker, selection: Selection, value: Tensor) -> None:
        tokens = Selection(tokens=selection.tokens)
        if selection.heads is not None:
            whole = self.read(passing, worker, tokens)
            whole[:, :, list(selection.heads)] = value
            value = whole
        super().write(passing, worker, tokens, value.flatten(-2))


class HeadResultsChannel(HeadsFormulaChannel):
    """Each head's part of the output projection's result: [1, token, head, d_model].

    A plain matrix is cut by head. Anything else (adapters, quantised weights, hooks) is asked itself for each head,
    with zeros in the place of the others, less what it makes of nothing.
    """

    def __init__(self, name: str, formula: Formula, num_heads: int) -> None:
        super().__init__(name, formula, num_heads)
        self.writable = False

    def read(self, passing: Call, worker: Worker, selection: Selection) -> Tensor:
        premix = super().read(passing, worker, Selection(tokens=selection.tokens))
        heads = list(range(self.num_heads) if selection.heads is None else selection.heads)
        projection = passing.gate.module
        if type(projection) not in (nn.Linear, Conv1D) or not passing.gate.is_plain:
            return self._asked(projection, premix, heads)
        weight = cast("Tensor", projection.weight)
        weight = weight.T if isinstance(projection, nn.Linear) else weight  # Conv1D keeps [in, out]
        by_head = weight.reshape(self.num_heads, -1, weight.shape[-1])[heads]
        return torch.einsum("bthd,hdm->bthm", premix[:, :, heads], by_head.to(premix.dtype))

    def _asked(self, projection: nn.Module, premix: Tensor, heads: list[int]) -> Tensor:
        """Unavailable for a projection whose result is not a sum over heads."""
        alone = torch.zeros_like(premix).repeat(len(heads), 1, 1, 1)
        alone[range(len(heads)), :, heads] = premix[0, :, heads].transpose(0, 1)
        rest = premix - alone.sum(0, keepdim=True)
        asked = torch.cat([torch.zeros_like(premix), premix, rest, alone]).flatten(-2)
        nothing, whole, others, *each = (cast("Tensor", projection(rows[None])) for rows in asked)
        parts = torch.stack([part - nothing for part in each], 2)
        total, rounding = parts.sum(2) + others, ROUNDING.get(premix.dtype, 5e-2)
        if not bool(((total - whole).abs() <= rounding * whole.abs().amax(-1, keepdim=True)).all()):
            reason = f"what {type(projection).__name__} gives is not a sum over heads"
            raise Unavailable(f"{self.name} is not available: {reason}.")
        return parts


class LogitsChannel(Channel):
    """The row that is sampled from, [1, 1, vocab]."""

    def __init__(self) -> None:
        self.name = self.memory = "logits"
        self.site, self.writable = Site("", Port.OUTPUT), True

    def read(self, passing: Call, worker: Worker, selection: Selection) -> Tensor:
        return self._row(passing, worker).clone()

    def write(self, passing: Call, worker: Worker, selection: Selection, value: Tensor) -> None:
        self._row(passing, worker).copy_(value)

    @staticmethod
    def _row(passing: Call, worker: Worker) -> Tensor:
        index = worker.rows.index
        return passing.output.logits[index : index + 1, -1:]


class NextTokenProbabilitiesChannel(LogitsChannel):
    """Softmax of the logits as they stand, [1, vocab], float32."""

    def __init__(self) -> None:
        super().__init__()
        self.name = self.memory = "next_token_probabilities"
        self.writable = False

    def read(self, passing: Call, worker: Worker, selection: Selection) -> Tensor:
        return torch.softmax(self._row(passing, worker)[:, 0].float(), -1)


class OperandChannel(Channel):
    """Queries, keys or values as the attention op receives them: this step's rows, [1, heads, token, width]."""

    def __init__(self, name: str, path: str, which: str, call: int, unheld: str | None = None) -> None:
        self.name, self.which, self.writable, self.unheld = name, which, True, unheld
        self.memory = f"{path}.{which}"
        self.site = Site(path, Port.ATTEND, call)

    def read(self, passing: AttentionCall, worker: Worker, selection: Selection) -> Tensor:
        rows = self._rows(passing, worker)
        if selection.heads is not None:
            rows = rows[:, list(selection.heads)]
        if selection.tokens is not None:
            rows = rows[:, :, list(selection.tokens)]
        return rows.clone(memory_format=torch.contiguous_format)

    def write(self, passing: AttentionCall, worker: Worker, selection: Selection, value: Tensor) -> None:
        refuse_unheld(self, passing)
        whole = self._rows(passing, worker).clone(memory_format=torch.contiguous_format)
        heads = _picked(selection.heads, whole, 1)
        tokens = _picked(selection.tokens, whole, 2)
        whole[:, heads[:, None], tokens[None, :]] = value
        if self.which == "q":
            passing.q = passing.q.clone()
            passing.q[worker.rows.index, :, worker.rows.tokens(worker.waiting_step)] = whole[0]
        else:
            passing.write_cache(self.which, worker.rows.index, passing.new_rows(worker.rows), whole[0])

    def _rows(self, passing: AttentionCall, worker: Worker) -> Tensor:
        index = worker.rows.index
        if self.which == "q":
            return passing.q[index : index + 1, :, worker.rows.tokens(worker.waiting_step)]
        return getattr(passing, self.which)[index : index + 1, :, passing.new_rows(worker.rows)]


class CachedChannel(Channel):
    """Keys or values of all of the request so far, [1, kv_head, key, width]; NaN where a window has dropped one."""

    def __init__(self, name: str, path: str, which: str, call: int, unheld: str | None = None) -> None:
        self.name, self.which, self.writable, self.unheld = name, which, True, unheld
        self.memory = f"{path}.{which}"
        self.site = Site(path, Port.ATTEND, call)

    def read(self, passing: AttentionCall, worker: Worker, selection: Selection) -> Tensor:
        window = passing.window(worker.rows)
        given: Tensor = getattr(passing, self.which)[worker.rows.index]
        kept = window.cut(given if selection.heads is None else given[list(selection.heads)])
        return window.spread(kept, -2, float("nan")).clone(memory_format=torch.contiguous_format)[None]

    def write(self, passing: AttentionCall, worker: Worker, selection: Selection, value: Tensor) -> None:
        refuse_unheld(self, passing)
        window, index = passing.window(worker.rows), worker.rows.index
        whole = window.cut(getattr(passing, self.which)[index]).clone()
        whole[slice(None) if selection.heads is None else list(selection.heads)] = value[0, :, window.token :]
        passing.write_cache(self.which, index, slice(window.first, None), whole)


def _picked(picks: tuple[int, ...] | None, tensor: Tensor, axis: int) -> Tensor:
    """Indices on an axis of `tensor`, beside it: a block may have another device as torch's default."""
    return torch.tensor(picks if picks is not None else range(tensor.shape[axis]), device=tensor.device)


def refuse_unheld(channel: OperandChannel | CachedChannel, passing: AttentionCall) -> None:
    """Unavailable for an edit that later steps would not see, and for a read whose gradients would be without them."""
    if channel.unheld is None or (passing.gradients and passing.one_step):
        return
    if passing.gradients:
        raise Unavailable(
            f"{channel.name} has no gradients over several steps, since {channel.unheld}: ask for max_tokens=1."
        )
    raise Unavailable(f"{channel.name} can be read, not edited: {channel.unheld}.")


class PrerotaryChannel(Channel):
    """Queries or keys before the rotary embedding: heads of a projection's result, [1, heads, token, d_head]."""

    def __init__(self, name: str, path: str, projections: tuple[Projection, ...], call: int) -> None:
        self.name = self.memory = name
        self.site, self.writable, self.projections = Site(path, Port.ATTEND, call), False, projections

    def read(self, passing: AttentionCall, worker: Worker, selection: Selection) -> Tensor:
        node = passing.nodes.get(self.projections[0]) if len(self.projections) == 1 else None
        if node is not None and worker.batch_size == 1 and selection == WHOLE:
            return node  # not a copy: the model has gone on from it already
        heads = torch.cat([self._piece(passing, worker, projection) for projection in self.projections], -1)
        if selection.heads is not None:
            heads = heads[:, list(selection.heads)]
        return heads[:, :, list(selection.tokens)].clone() if selection.tokens is not None else heads.clone()

    def _piece(self, passing: AttentionCall, worker: Worker, projection: Projection) -> Tensor:
        kept = passing.prerotary.get(projection.site.path)
        if kept is None:
            raise Unavailable(
                f"{self.name} was asked for after its projection had run; name it in the block so that it is kept."
            )
        index = worker.rows.index
        # The last rows: latent attention projects all of its cache again at each step.
        return cut(kept[index : index + 1], projection)[:, :, -worker.rows.num_tokens(worker.waiting_step) :]


class ScoresChannel(Channel):
    """What enters the softmax, or with `pattern` what leaves it: [1, head, token, key], float32."""

    def __init__(self, name: str, path: str, call: int, *, pattern: bool) -> None:
        self.name = self.memory = name
        self.pattern, self.writable = pattern, True
        self.site = Site(path, Port.PATTERN if pattern else Port.SCORES, call)

    def read(self, passing: AttentionCall, worker: Worker, selection: Selection) -> Tensor:
        return passing.pattern(worker.rows, selection) if self.pattern else passing.scores(worker.rows, selection)

    def write(self, passing: AttentionCall, worker: Worker, selection: Selection, value: Tensor) -> None:
        (passing.write_pattern if self.pattern else passing.write_scores)(worker.rows, selection, value)


class HeadOutputsChannel(Channel):
    """What each head writes, before gate and output projection: [1, token, head, d_value]."""

    def __init__(self, name: str, path: str, call: int) -> None:
        self.name = self.memory = name
        self.site, self.writable = Site(path, Port.HEADS, call), True

    def read(self, passing: AttentionCall, worker: Worker, selection: Selection) -> Tensor:
        rows = self._rows(passing, worker)
        if selection.tokens is not None:
            rows = rows[:, list(selection.tokens)]
        return (
            rows[:, :, list(selection.heads)]
            if selection.heads is not None
            else rows.clone(memory_format=torch.contiguous_format)
        )

    def write(self, passing: AttentionCall, worker: Worker, selection: Selection, value: Tensor) -> None:
        rows = self._rows(passing, worker)
        tokens, heads = _picked(selection.tokens, rows, 1), _picked(selection.heads, rows, 2)
        rows[:, tokens[:, None], heads[None, :]] = value

    @staticmethod
    def _rows(passing: AttentionCall, worker: Worker) -> Tensor:
        assert passing.outputs is not None
        return passing.outputs[worker.rows.index : worker.rows.index + 1, worker.rows.tokens(worker.waiting_step)]


class RawChannel(Channel):
    """Whatever passes at a module's `.input`, `.inputs` or `.output`, in the engine's own layout.

    A block that uses raw places runs in a batch of its own, so nothing needs to be cut.
    """

    def __init__(self, path: str, port: str) -> None:
        self.name = self.memory = f"{path or '(root)'}.{port}"
        self.port, self.writable = port, True
        self.site = Site(path, Port.OUTPUT if port == "output" else Port.INPUT)

    def read(self, passing: Call, worker: Worker, selection: Selection) -> Any:
        if worker.batch_size > 1:
            raise Unavailable(
                f"{self.name} holds several requests in this batch; name it in the block itself, so that it runs alone."
            )
        return private_copy(self._found(passing))

    def write(self, passing: Call, worker: Worker, selection: Selection, value: Any) -> None:
        if self.port == "output":
            passing.output = private_copy(value)
        elif self.port == "input":
            passing.replace_argument(None, private_copy(value))
        else:
            passing.args, passing.kwargs = private_copy(value[0]), private_copy(value[1])

    def check(self, wanted: Any, value: Any) -> None:
        same_nest(self, wanted, value)

    def _found(self, passing: Call) -> Any:
        if self.port == "output":
            return passing.output
        return passing.argument(None) if self.port == "input" else (passing.args, passing.kwargs)


class OpInputsChannel(Channel):
    """((q, k, v), kwargs) of an attention op, each [token, heads * width], as vLLM's Attention has them."""

    def __init__(self, path: str, call: int, name: str) -> None:
        self.name = self.memory = f"{name}.inputs"
        self.site, self.writable = Site(path, Port.ATTEND, call), True
        self.operands = [OperandChannel(f"{name}.inputs", path, which, call) for which in "qkv"]

    def read(self, passing: AttentionCall, worker: Worker, selection: Selection) -> Any:
        flat = tuple(_flat(operand.read(passing, worker, WHOLE)) for operand in self.operands)
        return flat, dict(passing.extra)

    def write(self, passing: AttentionCall, worker: Worker, selection: Selection, value: Any) -> None:
        for operand, new in zip(self.operands, value[0], strict=True):
            old = operand.read(passing, worker, WHOLE)
            heads = new.reshape(new.shape[0], old.shape[1], -1).transpose(0, 1)[None]
            if heads.requires_grad or not torch.equal(heads, old):
                operand.write(passing, worker, WHOLE, heads)

    def check(self, wanted: Any, value: Any) -> None:
        same_nest(self, wanted[0], value[0])


class OpOutputChannel(HeadOutputsChannel):
    """The head outputs as [token, heads * d_value]."""

    def __init__(self, path: str, call: int, name: str) -> None:
        super().__init__(f"{name}.output", path, call)

    def read(self, passing: AttentionCall, worker: Worker, selection: Selection) -> Tensor:
        return super().read(passing, worker, WHOLE)[0].flatten(1)

    def write(self, passing: AttentionCall, worker: Worker, selection: Selection, value: Tensor) -> None:
        heads = self._rows(passing, worker).shape[2]
        super().write(passing, worker, WHOLE, value.reshape(1, value.shape[0], heads, -1))


def _flat(heads: Tensor) -> Tensor:
    return heads[0].transpose(0, 1).flatten(1)


def same_nest(channel: Channel, wanted: Any, value: Any) -> None:
    """Refuses an assigned nest whose tensors are not of the shapes, dtypes and devices of what it replaces."""
    if isinstance(wanted, Tensor):
        Channel.check(channel, wanted, value)
    elif isinstance(wanted, tuple | list):
        ours, given = cast("Sequence[Any]", wanted), cast("Sequence[Any]", value)
        if type(given) is not type(ours) or len(given) != len(ours):
            kind = type(ours).__name__
            raise EditMismatch(f"{channel.name} is a {kind} of {len(ours)}; a {type(given).__name__} was assigned.")
        for one, other in zip(ours, given, strict=True):
            same_nest(channel, one, other)
