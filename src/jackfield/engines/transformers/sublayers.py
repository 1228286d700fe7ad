"""The two sublayers of a block, found by what they add to the stream.

The stream that leaves is the stream that enters plus two summands. The attention's is looked for among the results of
the modules around the op that attends and of those that take these results (a norm after the sublayer); the MLP's among
the rest. Which sum holds is decided by numbers. A block that only adds its sublayers on the way, and does more with its
stream besides, is read by the sums that are seen entering its modules.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jackfield.engines.transformers.dataflow import (
    Block,
    Term,
    input_formula,
    is_linear,
    is_norm,
    maker,
    terms,
)
from jackfield.engines.transformers.recording import Call, Seen
from jackfield.engines.transformers.sums import find_sum, leaves_little
from jackfield.values.anatomy import Formula, Missing
from jackfield.values.families.names import MIXERS, MLPS, MULTIPLIERS


@dataclass(frozen=True, slots=True, eq=False)
class Sublayers:
    """What was found to add to the stream of one block. `whole`: the two summands are all that the block adds.

    `middle` is the stream between them, [row, width].
    """

    attention: Term | None
    mlp: Term | None
    whole: bool
    middle: Tensor | None


NO_SUBLAYERS = Sublayers(None, None, False, None)


def find_sublayers(block: Block, attention: str | None, config: object) -> Sublayers:
    """The sublayers of `block`. `attention` is the path of the module that attends; None where none does."""
    mixers = _mixers(block, attention)
    candidates = [(mixer, _rest(block, mixer)) for mixer in mixers]
    found = find_sum(block, candidates, _factors(block.call.module, config))
    if found is None:
        return _on_the_way(block, mixers)
    if attention is None and found.mlp is None and _is_named(found.attention.call, MLPS):
        return Sublayers(None, found.attention, True, None)
    return Sublayers(found.attention, found.mlp, True, found.middle)


def core(block: Block, term: Term) -> Call:
    """The sublayer itself, behind the norms and dropouts that its summand went through."""
    call = term.call
    while (is_norm(call) or _is_bare(call)) and call.argument is not None:
        before = maker(block, call.argument, call.start)
        if before is None:
            return call
        call = before
    return call


def _mixers(block: Block, attention: str | None) -> list[Call]:
    """The calls whose result may be what the attention adds, likeliest first."""
    if attention is None:
        children = [call for call in block.inside if block.depth(call) == 1 and not is_norm(call)]
        starts = sorted(children, key=lambda call: not _is_named(call, MIXERS))
    else:
        starts = block.around(attention)
    candidates = [call for call in starts if block.gives_stream(call) and block.once(call)]
    followers = [after for call in candidates for after in _followers(block, call)]
    if attention is None:
        return [*candidates, *followers]
    return [*candidates, *followers, *(last for call in candidates for last in _last_projection(block, call))]


def _last_projection(block: Block, call: Call) -> list[Call]:
    """The projection inside `call` that ran last: what a sublayer makes that then adds the stream to it by itself."""
    inside = [other for other in block.inside if call.holds(other) and is_linear(other)]
    return [other for other in inside[-1:] if block.gives_stream(other) and block.once(other)]


def _followers(block: Block, call: Call) -> list[Call]:
    """The norms and dropouts that the result of `call` goes through, one after the other."""
    chain: list[Call] = []
    seen = call.result
    while seen is not None:
        taking = [
            other
            for other in block.inside
            if other.start > call.end and other.argument is not None and other.argument.equals(seen)
        ]
        passing = [other for other in taking if (is_norm(other) or _is_bare(other)) and other not in chain]
        if not passing:
            return [other for other in chain if block.once(other)]
        chain.append(passing[0])
        seen = passing[0].result
    return chain


def _is_bare(call: Call) -> bool:
    return not any(True for _ in call.module.parameters())


def _is_named(call: Call, hints: Iterable[str]) -> bool:
    """Whether the class of the module of `call` has one of `hints` in its name, or else the module itself."""
    kind, name = type(call.module).__name__.lower(), call.path.rpartition(".")[2].lower()
    others = (*MIXERS, *MLPS)
    return any(hint in (kind if any(other in kind for other in others) else name) for hint in hints)


def _rest(block: Block, mixer: Call) -> list[Call]:
    """The calls whose result may be what the MLP adds, likeliest first: sublayers before norms, children first."""
    calls = [call for call in block.outside(mixer.path) if block.gives_stream(call) and block.once(call)]
    return sorted(calls, key=lambda call: (is_norm(call), _is_bare(call), block.depth(call)))


def _factors(block: nn.Module, config: object) -> list[float]:
    """The numbers that a block may multiply what it adds with: its own, or its configuration's."""
    held = [*vars(block).values(), *(getattr(config, name, None) for name in MULTIPLIERS)]
    return list(dict.fromkeys(value for value in held if isinstance(value, float) and value not in (0.0, 1.0)))


def _on_the_way(block: Block, mixers: list[Call]) -> Sublayers:
    """The sublayers whose sums with the stream are seen entering a module, in a block that does more besides."""
    bases = [block.entering]
    attention, middle = _added(block, mixers, bases)
    if attention is None or middle is None:
        return NO_SUBLAYERS
    renormed = [call.result for call in block.inside if call.argument is not None and call.argument.equals(middle)]
    rest = [call for call in _rest(block, attention.call) if call.start > attention.call.end]
    mlp, _ = _added(block, rest, [middle, *(seen for seen in renormed if seen is not None)])
    return Sublayers(attention, mlp, False, middle.rows)


def _added(block: Block, calls: Iterable[Call], bases: list[Seen]) -> tuple[Term | None, Seen | None]:
    """The first of `calls` whose result, added to one of `bases`, is seen: taken by a module, or leaving the block."""
    for call in calls:
        taken = [seen for other in block.inside if other.start > call.end for seen in other.arguments.values()]
        term = next(terms(block, call))
        for base in bases:
            for seen in (*taken, block.leaving):
                if _is_sum(seen, base, term, block):
                    return term, seen
    return None, None


def _is_sum(seen: Seen, base: Seen, term: Term, block: Block) -> bool:
    if seen.rows.shape != term.value.shape or base.rows.shape != term.value.shape or seen.equals(base):
        return False
    total = base.rows + term.value
    return torch.equal(total, seen.rows) or leaves_little(total, seen.rows, [term.value], block.dtype)


def find_norm(block: Block, sublayer: Call, taken: Seen | None) -> Call | None:
    """The norm whose result is `taken`, which `sublayer` takes; or, where it norms for itself, the one inside it."""
    if taken is None:
        return None
    made = maker(block, taken, sublayer.start)
    if made is not None and is_norm(made):
        return made
    within = [call for call in block.inside if sublayer.holds(call) and is_norm(call) and block.once(call)]
    return next((call for call in within if call.argument is not None and call.argument.equals(taken)), None)


def find_middle(block: Block, middle: Tensor, sublayer: Call, norm: Call | None) -> Formula | Missing:
    """Where the stream between the sublayers is taken: by the MLP's norm, else by the MLP."""
    for call in (norm, sublayer):
        seen = None if call is None else call.argument
        if call is not None and seen is not None and _is_near(seen.rows, middle, block):
            return input_formula(call, seen, block.tokens)
        if call is not None and seen is not None and seen.equals(block.entering):
            return Missing("parallel block: attention and MLP read the same stream, so there is no stream between them")
    return Missing("no module of this block takes the stream between attention and MLP")


def _is_near(rows: Tensor, middle: Tensor, block: Block) -> bool:
    """Whether `rows` is `middle`, and not the stream that entered, however little the attention added."""
    added = middle.double() - block.entering.rows.double()
    return torch.equal(rows, middle) or leaves_little(rows, middle, [added], block.dtype)


def inline_entry(block: Block, last: Call) -> Call:
    """The first projection of an MLP that has no module of its own, given its last."""
    parent = last.path.rpartition(".")[0]
    siblings = [
        call
        for call in block.inside
        if is_linear(call) and call.path.rpartition(".")[0] == parent and call.start < last.start and block.once(call)
    ]
    return siblings[0] if siblings else last
