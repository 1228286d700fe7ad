"""How a block's tensors hang together: what a module made, who took it, and which sums the stream is made of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from jackfield.engines.transformers.recording import Call, Recording, Seen
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Formula

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two [row, width] agree, row by row, as sums of numbers of `dtype` do."""
    if found.shape != expected.shape:
        return False
    difference = (found.double() - expected.double()).abs().amax(dim=-1)
    largest = expected.double().abs().amax(dim=-1)
    return bool((difference <= _TOLERANCES.get(dtype, 1e-4) * largest + 1e-30).all())


def least_squares(columns: Tensor, target: Tensor) -> Tensor:
    """The factors [column] of `columns` [row, column] whose sum is nearest to `target` [row]."""
    solve = cast("Callable[[Tensor, Tensor], tuple[Tensor, ...]]", torch.linalg.lstsq)  # untyped in torch
    return solve(columns, target[:, None])[0][:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A summand of the stream: where it is, and the numbers [row, width] that the prompt left there, unscaled."""

    formula: Formula
    value: Tensor
    call: Call


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One decoder block of a recording: its call, the calls inside it, its stream in and out."""

    number: int
    call: Call
    inside: list[Call]
    tokens: int
    entering: Seen
    leaving: Seen

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stream, which says how exact its sums are."""
        return self.leaving.value.dtype

    @property
    def has_one_stream(self) -> bool:
        """Whether the stream is one argument [1, token, width]: some blocks hand on several, side by side."""
        return self.entering.value.ndim == 3 and not any(seen is self.entering for seen in self.call.nested)

    @property
    def path(self) -> str:
        """The block's own path."""
        return self.call.path

    def depth(self, call: Call) -> int:
        """How far below the block the module of `call` is; 1 is a child."""
        return call.path.removeprefix(self.path).count(".")

    def once(self, call: Call) -> bool:
        """Whether the module of `call` runs once in this block, so that its path says which call is meant."""
        return sum(other.path == call.path for other in self.inside) == 1

    def gives_stream(self, call: Call) -> bool:
        """Whether the result of `call` has the rows and the width of the stream."""
        return call.result is not None and call.result.rows.shape == self.entering.rows.shape

    def around(self, path: str) -> list[Call]:
        """The calls of the module at `path` and of those around it, below the block, outermost first."""
        calls = [call for call in self.inside if path == call.path or path.startswith(f"{call.path}.")]
        return sorted((call for call in calls if self.once(call)), key=self.depth)

    def outside(self, path: str) -> list[Call]:
        """The calls of modules that are neither at `path`, nor below it, nor around it."""
        return [call for call in self.inside if not _related(call.path, path)]


def blocks_of(recording: Recording, calls: list[Call]) -> list[Block]:
    """The blocks whose calls are given, in order."""
    blocks: list[Block] = []
    for number, call in enumerate(calls):
        entering, leaving = call.argument, call.result
        assert entering is not None  # find_blocks took only calls that carry the tokens in and out
        assert leaving is not None
        blocks.append(Block(number, call, recording.below(call), recording.tokens, entering, leaving))
    return blocks


def _related(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def output_formula(call: Call, tokens: int) -> Formula:
    """The result of `call`, as it is."""
    return Formula(Site(call.path, Port.OUTPUT), flat=_is_flat(call.result, tokens))


def input_formula(call: Call, seen: Seen, tokens: int) -> Formula:
    """The argument `seen` of `call`, as it is."""
    return Formula(Site(call.path, Port.INPUT, call.argument_key(seen)), flat=_is_flat(seen, tokens))


def _is_flat(seen: Seen | None, tokens: int) -> bool:
    return seen is not None and seen.value.ndim == 2 and seen.value.shape[0] == tokens


def terms(block: Block, call: Call) -> Iterator[Term]:
    """What `call` may add to the stream, likeliest first: its result, or that less a stream that was passed in."""
    assert call.result is not None
    plain = output_formula(call, block.tokens)
    rows = call.result.rows
    yield Term(plain, rows, call)
    if _ends_in_norm(block, call):  # then its result less its input is a difference, but nothing that was added
        return
    residuals = [seen for seen in call.arguments.values() if seen.rows.shape == call.result.rows.shape]
    for seen in reversed(residuals):  # the residual is passed after what the sublayer reads
        minus = Site(call.path, Port.INPUT, call.argument_key(seen))
        yield Term(Formula(plain.site, minus, flat=plain.flat), rows.double() - seen.rows.double(), call)


def _ends_in_norm(block: Block, call: Call) -> bool:
    inside = [other.result for other in block.inside if call.holds(other) and is_norm(other)]
    return any(result is not None and call.result is not None and result.equals(call.result) for result in inside)


def is_norm(call: Call) -> bool:
    """Whether the module of `call` only rescales what it is given: its parameters are vectors at most."""
    module = call.module
    named = "norm" in type(module).__name__.lower()
    small = all(parameter.ndim <= 1 for parameter in module.parameters())
    some = named or any(True for _ in module.parameters())
    alike = call.argument is not None and call.result is not None
    return small and some and alike and call.argument.rows.shape == call.result.rows.shape  # type: ignore[union-attr]


def is_linear(call: Call) -> bool:
    """Whether the module of `call` is a projection, plain, quantised or adapted: one matrix, one tensor out."""
    weight = getattr(call.module, "weight", None)  # foreign: nn.Linear, Conv1D, adapters around them
    matrix = isinstance(weight, Tensor) and weight.ndim == 2
    return matrix and call.is_tensor and not isinstance(call.module, nn.Embedding)


def maker(block: Block, seen: Seen, before: int) -> Call | None:
    """The call inside the block that gave `seen`, before that event; the same object before equal numbers."""
    made = [
        call
        for call in block.inside
        if call.end < before and call.result is not None and call.result.equals(seen) and block.once(call)
    ]
    same = [call for call in made if call.result is not None and call.result.shares(seen)]
    changing = [call for call in same or made if not _passes_on(call)]
    return next(iter(changing or same or made), None)


def _passes_on(call: Call) -> bool:
    """Whether the call gives what it was given (dropout, an identity)."""
    return call.argument is not None and call.result is not None and call.argument.equals(call.result)
