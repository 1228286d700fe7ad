"""The text of code that is running: which `with` a frame stands in, which `def` a function came from.

A text is trusted only when it is the one that was executed. A file edited after its import, or another cell under an
old name, is refused instead of run.
"""

import ast
import dis
import functools
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from jackfield.errors import NoSource
from jackfield.trace.compiling import Place, first_line
from jackfield.trace.sameness import is_text_of

_RUN_FORM = (
    "    def block(model, t):\n        ...\n        t.save(name=value)\n\n    result = model.run(prompt, block)\n"
)


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


def with_statement(code: CodeType, instruction: int, module: dict[str, Any]) -> With:
    """The `with` whose `__enter__` is called by `code`, at the offset `instruction`.

    Raises NoSource where Python kept no text, where the text is not what runs, or where no `with` makes the call.
    """
    for text in _texts(code.co_filename, module):
        found = _find_with(text, code, code.co_filename, instruction, not _is_rewritten(module))
        if found is not None:
            return found
    line = _positions(code)[instruction // 2][0]
    reason = "Python has no text of it, the text has changed since it was loaded, or it is not entered by a `with`"
    raise no_source(code.co_filename, line, reason)


def definition(code: CodeType, module: dict[str, Any]) -> Definition | None:
    """What `code` was compiled from; None where its text cannot be had."""
    found = (
        _find_definition(text, code, code.co_filename, not _is_rewritten(module))
        for text in _texts(code.co_filename, module)
    )
    return next((place for place in found if place is not None), None)


def no_source(filename: str, line: int | None, reason: str) -> NoSource:
    """The error for a block that cannot be lifted, which shows the form that needs no lifting."""
    return NoSource(
        f"The block at {filename}:{line} cannot be lifted: {reason}. Write it as a function:\n\n{_RUN_FORM}"
    )


def _is_rewritten(module: dict[str, Any]) -> bool:
    """Whether pytest has rewritten the assert statements of a module, which then mention more than was written."""
    return "@pytest_ar" in module


def _texts(filename: str, module: dict[str, Any]) -> Iterator[str]:
    """The text as it was last read, then as it is now."""
    lines = linecache.getlines(filename, module)
    if lines:
        yield "".join(lines)
        linecache.checkcache(filename)
        yield "".join(linecache.getlines(filename, module))
    elif filename == "<string>" and "-c" in sys.orig_argv:  # before 3.13, linecache does not know this program
        yield sys.orig_argv[sys.orig_argv.index("-c") + 1]
    elif filename == "<timed exec>" and module.get("In"):  # IPython's %%time compiles its cell without keeping it
        yield _magic_cell(module["In"][-1])


def _magic_cell(command: str) -> str:
    """The text of a cell under a magic, which IPython keeps as `get_ipython().run_cell_magic('time', '', text)`."""
    constants = [node.value for node in ast.walk(_parse(command)) if isinstance(node, ast.Constant)]
    return str(constants[-1]) if len(constants) == 3 else ""


@functools.lru_cache(maxsize=256)
def _find_with(text: str, code: CodeType, filename: str, instruction: int, exactly: bool) -> With | None:
    for node, owner in _nodes(_parse(text), ast.With):
        item = _item(node, code, instruction)
        place = Place(filename, owner, code.co_flags)
        alone = first_line(node.body[0]) > max(item.context_expr.end_lineno or 0 for item in node.items)
        if item is not None and is_text_of(code, node.body, place, exactly=exactly and alone):
            return With(node, item, place)
    return None


@functools.lru_cache(maxsize=256)
def _find_definition(text: str, code: CodeType, filename: str, exactly: bool) -> Definition | None:
    for node, owner in _nodes(_parse(text), ast.FunctionDef, ast.Lambda):
        found = Definition(node, Place(filename, owner, code.co_flags))
        if _defines(node, code) and is_text_of(code, found.body, found.place, exactly=exactly):
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
