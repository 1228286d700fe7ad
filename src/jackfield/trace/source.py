"""The text of code that is running: which `with` a frame stands in, which `def` a function came from.

A text is trusted only when it is the one that was executed. A file edited after its import, or another cell under an
old name, compiles to other names or constants on the same lines; that is refused instead of run.
"""

import ast
import dis
import functools
import itertools
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

from jackfield.errors import NoSource
from jackfield.trace.compiling import Place, statements_code

_RUN_FORM = (
    "    def block(model, t):\n        ...\n        t.save(name=value)\n\n    result = model.run(prompt, block)\n"
)

# Where variables are only set up: a module's and a function's code differ there, for one text.
_SETUP = frozenset({"LOAD_CLOSURE", "MAKE_CELL", "LOAD_FAST_AND_CLEAR", "RETURN_CONST"})


@dataclass(frozen=True, slots=True)
class With:
    """A `with` statement, and which of its items is being entered."""

    node: ast.With
    item: int
    place: Place


@dataclass(frozen=True, slots=True)
class Definition:
    """The `def` or `lambda` of a function."""

    node: ast.FunctionDef | ast.Lambda
    place: Place

    @property
    def body(self) -> list[ast.stmt]:
        """What the function runs."""
        node = self.node
        return node.body if isinstance(node, ast.FunctionDef) else [ast.copy_location(ast.Expr(node.body), node.body)]


def with_statement(code: CodeType, instruction: int, module: Mapping[str, Any]) -> With:
    """The `with` whose `__enter__` is called by `code`, at the offset `instruction`.

    Raises NoSource where Python kept no text, where the text is not what runs, or where no `with` makes the call.
    """
    for text in _texts(code.co_filename, module):
        found = _find_with(text, code, code.co_filename, instruction, "@pytest_ar" in module)
        if found is not None:
            return found
    line = _positions(code)[instruction // 2][0]
    reason = "Python has no text of it, the text has changed since it was loaded, or it is not entered by a `with`"
    raise no_source(code.co_filename, line, reason)


def definition(code: CodeType, module: Mapping[str, Any]) -> Definition | None:
    """What `code` was compiled from; None where its text cannot be had."""
    found = (
        _find_definition(text, code, code.co_filename, "@pytest_ar" in module)
        for text in _texts(code.co_filename, module)
    )
    return next((place for place in found if place is not None), None)


def no_source(filename: str, line: int | None, reason: str) -> NoSource:
    """The error for a block that cannot be lifted, which shows the form that needs no lifting."""
    return NoSource(
        f"The block at {filename}:{line} cannot be lifted: {reason}. Write it as a function:\n\n{_RUN_FORM}"
    )


def _texts(filename: str, module: Mapping[str, Any]) -> Iterator[str]:
    """The text as it was last read, then as it is now."""
    lines = linecache.getlines(filename, dict(module))
    if lines:
        yield "".join(lines)
        linecache.checkcache(filename)
        yield "".join(linecache.getlines(filename, dict(module)))
    elif filename == "<string>" and "-c" in sys.orig_argv:  # before 3.13, linecache does not know this program
        yield sys.orig_argv[sys.orig_argv.index("-c") + 1]


@functools.lru_cache(maxsize=256)
def _find_with(text: str, code: CodeType, filename: str, instruction: int, rewritten: bool) -> With | None:
    for node, owner in _nodes(_parse(text), ast.With):
        item = _item(node, code, instruction)
        place = Place(filename, owner, code.co_flags)
        if item is not None and _same_text(node.body, code, place, rewritten=rewritten):
            return With(node, item, place)
    return None


@functools.lru_cache(maxsize=256)
def _find_definition(text: str, code: CodeType, filename: str, rewritten: bool) -> Definition | None:
    for node, owner in _nodes(_parse(text), ast.FunctionDef, ast.Lambda):
        found = Definition(node, Place(filename, owner, code.co_flags))
        if _defines(node, code) and _same_text(found.body, code, found.place, rewritten=rewritten):
            return found
    return None


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def _nodes(node: ast.AST, *kinds: type[Any], owner: str | None = None) -> Iterator[tuple[Any, str | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, kinds):
            yield child, owner
        yield from _nodes(child, *kinds, owner=child.name if isinstance(child, ast.ClassDef) else owner)


def _positions(code: CodeType) -> Sequence[tuple[int | None, ...]]:
    return list(code.co_positions())


def _span(node: ast.stmt | ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _item(node: ast.With, code: CodeType, instruction: int) -> int | None:
    """Which item of `node` is entered at `instruction`; None where that is another statement's call.

    From Python 3.12 on the call has the item's position. 3.11 gives all items the statement's: they are counted there.
    """
    here = _positions(code)[instruction // 2]
    if not _enters(code, instruction):
        return None
    if _span(node) != here:
        return next((i for i, item in enumerate(node.items) if _span(item.context_expr) == here), None)
    entered = [i.offset for i in dis.get_instructions(code) if i.opname == "BEFORE_WITH" and i.positions == here]
    return sum(offset < instruction for offset in entered) % len(node.items)  # `finally` bodies are compiled twice


def _enters(code: CodeType, instruction: int) -> bool:
    """Whether the call is a `with` statement's own: BEFORE_WITH up to Python 3.13, a special method's call after."""
    before = [i.opname for i in dis.get_instructions(code) if i.offset <= instruction]
    return before[-1] == "BEFORE_WITH" or before[-2:] == ["LOAD_SPECIAL", "CALL"]


def _defines(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> bool:
    if isinstance(node, ast.FunctionDef):
        return (node.name, first_line(node)) == (code.co_name, code.co_firstlineno)
    spans = [position for position in _positions(code) if position[3]]  # without the entry and the return
    return code.co_name == "<lambda>" and bool(spans) and all(_inside(span, node.body) for span in spans)


def _inside(position: tuple[int | None, ...], node: ast.expr) -> bool:
    line, end_line, column, end_column = (part or 0 for part in position)
    first, last, first_column, last_column = (part or 0 for part in _span(node))
    return (first, first_column) <= (line, column) and (end_line, end_column) <= (last, last_column)


def _same_text(statements: list[ast.stmt], code: CodeType, place: Place, *, rewritten: bool) -> bool:
    """Whether `statements` mention what `code` mentions where they stand. (pytest `rewritten` asserts mention more.)"""
    try:
        own = statements_code(statements, code.co_name, (), place)
    except SyntaxError:  # a `break` out of the block and the like: lifting refuses it with its line
        return True
    otherwise = _lines_compiled_otherwise(statements)
    text, running = ({m for m in _mentioned(c, _extent(statements)) if m[0] not in otherwise} for c in (own, code))
    return text <= running if rewritten else text == running


def _lines_compiled_otherwise(statements: list[ast.stmt]) -> set[int]:
    """A module's code evaluates the annotations of variables; a `return` inside of a `with` leaves that first."""
    own = [node for node in own_nodes(statements) if isinstance(node, ast.AnnAssign | ast.Return)]
    return {line for node in own for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a block that are not of a function or class inside it."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from own_nodes(ast.iter_child_nodes(node))


def _extent(statements: list[ast.stmt]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Line and column at which `statements` begin and end."""
    first, last = statements[0], statements[-1]
    return (first_line(first), first.col_offset), (last.end_lineno or last.lineno, last.end_col_offset or 0)


def first_line(statement: ast.stmt) -> int:
    """The line on which a statement begins to run; decorators stand before their `def`."""
    decorators: Iterable[ast.expr] = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _mentioned(code: CodeType, extent: tuple[tuple[int, int], tuple[int, int]]) -> set[tuple[int, str]]:
    """The names and constants that `code`, and the functions inside it, mention within `extent`, with their lines."""
    found: set[tuple[int, str]] = set()
    for instruction in _without_qualified_name(dis.get_instructions(code)):
        place = instruction.positions
        if place and place.lineno and extent[0] <= (place.lineno, place.col_offset or 0) <= extent[1]:
            found |= {(place.lineno, mention) for mention in _mentions(instruction, code)}
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found.union(*(_mentioned(constant, extent) for constant in inner))


def _without_qualified_name(instructions: Iterable[dis.Instruction]) -> Iterator[dis.Instruction]:
    """A class inside the block begins by setting its `__qualname__`, which tells where it stands."""
    for instruction, following in itertools.pairwise(instructions):
        if not (following.opname == "STORE_NAME" and following.argval == "__qualname__"):
            yield instruction


def _mentions(instruction: dis.Instruction, code: CodeType) -> set[str]:
    value = instruction.argval
    variables = (*code.co_cellvars, *code.co_freevars)
    makes_closure = instruction.opname == "LOAD_FAST" and value in variables  # LOAD_CLOSURE, from Python 3.13 on
    named = isinstance(value, str) or instruction.opcode in dis.hasconst or "FAST" in instruction.opname
    if not named or value is None or isinstance(value, CodeType) or instruction.opname in _SETUP or makes_closure:
        return set()
    parts = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    return {part if isinstance(part, str) else repr(part) for part in parts if not str(part).startswith((".", "@"))}
