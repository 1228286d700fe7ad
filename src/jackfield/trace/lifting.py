"""A block's statements made into code of their own: saves rewritten, what cannot be lifted refused.

Everything here depends on the text alone, and is kept per text and place: entering the same `with` again costs a look.
"""

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType

from jackfield.trace.compiling import Place, first_line, function_code, own_copy, statements_code
from jackfield.trace.mentions import global_names
from jackfield.trace.saves import Saves
from jackfield.trace.scope import Change, Scope
from jackfield.trace.source import Definition, With, no_source


@dataclass(frozen=True, slots=True, eq=False)
class BodyText:
    """The body of a `with`, saves rewritten.

    `reads` are the names that it takes from outside; `early` are those of its own that it may read before it has bound
    them, so that they start from the outside value, where there is one. `target` is the name that the `with` binds.
    `written` is the body's code before its saves were rewritten.
    """

    statements: tuple[ast.stmt, ...]
    place: Place
    target: str | None
    saved: tuple[str, ...]
    changes: tuple[Change, ...]
    reads: frozenset[str]
    early: frozenset[str]
    written: CodeType

    @property
    def targets(self) -> frozenset[str]:
        """The target, if there is one."""
        return _one(self.target)

    @property
    def lines(self) -> range:
        """The lines on which the body stands."""
        last = self.statements[-1]
        return range(first_line(self.statements[0]), (last.end_lineno or last.lineno) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class FunctionText:
    """A function given as a block: its code, saves rewritten."""

    code: CodeType
    saved: tuple[str, ...]
    changes: tuple[Change, ...]


@functools.lru_cache(maxsize=256)
def body_text(found: With, tracers: frozenset[str]) -> BodyText:
    """The body of a `with`. `tracers` are the names that stand for `t` in it, beside the one the `with` binds.

    Raises NoSource for what cannot be lifted, and UnboundSave for a save that would be lost.
    """
    refusals = _Refusals(found.place.filename)
    target = refusals.header(found)
    statements = [own_copy(statement, found.place) for statement in found.node.body]
    refusals.walk(statements)
    written = refusals.compiled(statements, found.place)
    scope = Scope()
    scope.walk(statements)
    saves = Saves(found.place.filename, tracers | _one(target))
    statements = saves.rewrite(statements)
    early = frozenset(scope.early.intersection((*written.co_varnames, *written.co_cellvars)))
    reads = global_names(written) | early
    saved, changes = tuple(saves.names), tuple(scope.changes)
    return BodyText(tuple(statements), found.place, target, saved, changes, reads, early, written)


@functools.lru_cache(maxsize=256)
def body_code(text: BodyText, name: str, parameters: tuple[str, ...]) -> CodeType:
    """The body as a function that is called `name` in tracebacks; `parameters` are the early names with a value."""
    code = statements_code(text.statements, "block", parameters, text.place)
    return code.replace(co_name=name, co_qualname=name, co_firstlineno=text.lines[0])


@functools.lru_cache(maxsize=256)
def function_text(found: Definition, code: CodeType) -> FunctionText:
    """The function whose code is `code`, with its saves rewritten. Raises UnboundSave for one that would be lost."""
    node = own_copy(found.node, found.place)
    parameters = code.co_varnames[: code.co_argcount]
    scope = Scope(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2])
    saves = Saves(found.place.filename, frozenset(parameters[-1:]))
    body = node.body if isinstance(node, ast.FunctionDef) else [ast.copy_location(ast.Expr(node.body), node.body)]
    scope.walk(body)
    if isinstance(node, ast.FunctionDef):
        node.body = saves.rewrite(body)
    else:
        node.body = saves.visit(node.body)
    if saves.names:
        made = function_code(node, code.co_freevars, found.place)
        code = made.replace(co_name=code.co_name, co_qualname=code.co_qualname, co_firstlineno=code.co_firstlineno)
    return FunctionText(code, tuple(saves.names), tuple(scope.changes))


def _one(name: str | None) -> frozenset[str]:
    return frozenset(() if name is None else (name,))


class _Refusals(ast.NodeVisitor):
    """What makes sense only where it was written: control flow and names of the function around the block."""

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._in_loop = False
        self._in_function = False

    def header(self, found: With) -> str | None:
        """The name that the `with` binds."""
        node, target = found.node, found.node.items[found.item].optional_vars
        if found.item != len(node.items) - 1:
            raise self._refused(node, "it is not the last item of its `with`: put it last")
        if target is not None and not isinstance(target, ast.Name):
            raise self._refused(target, f"its `with` binds {ast.unparse(target)}, which is not a plain name")
        return target.id if target else None

    def walk(self, statements: Iterable[ast.AST]) -> None:
        """Raises NoSource for the first statement that cannot be lifted."""
        for statement in statements:
            self.visit(statement)

    def compiled(self, statements: Iterable[ast.stmt], place: Place) -> CodeType:
        """Their code. Raises NoSource for an inner function's `nonlocal` whose variable is none of the block's."""
        try:
            return statements_code(statements, "block", (), place)
        except SyntaxError as error:  # all the rest compiles by itself as it did where it was written
            reason = "it contains a `nonlocal` of a variable that belongs to the code around it"
            raise no_source(self._filename, error.lineno, reason) from None

    def visit(self, node: ast.AST) -> None:
        outside = self._outside(node)
        if outside is not None:
            raise self._refused(node, f"it contains {outside}, which belongs to the code around it")
        in_loop, in_function = self._in_loop, self._in_function
        self._in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
        if isinstance(node, ast.For | ast.While):
            self._loop(node)
        else:
            self.generic_visit(node)
        self._in_loop, self._in_function = in_loop, in_function

    def _loop(self, node: ast.For | ast.While) -> None:
        in_loop, self._in_loop = self._in_loop, True
        self.walk(node.body)
        self._in_loop = in_loop
        self.walk([*node.orelse, node.test] if isinstance(node, ast.While) else [*node.orelse, node.target, node.iter])

    def _outside(self, node: ast.AST) -> str | None:
        """What `node` is, where it reaches out of the block."""
        if isinstance(node, ast.Global):
            return "`global`"
        if self._in_function:
            return None
        if isinstance(node, ast.Break | ast.Continue) and not self._in_loop:
            return f"a `{ast.unparse(node)}` of a loop around it"
        if isinstance(node, ast.Call) and ast.unparse(node) == "super()":
            return "`super()`"
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return "`import *`"
        return _KEYWORDS.get(type(node)) or (
            "`async for`" if isinstance(node, ast.comprehension) and node.is_async else None
        )

    def _refused(self, node: ast.AST, reason: str) -> Exception:
        return no_source(self._filename, getattr(node, "lineno", None), reason)


_KEYWORDS: dict[type[ast.AST], str] = {
    ast.Return: "`return`",
    ast.Yield: "`yield`",
    ast.YieldFrom: "`yield from`",
    ast.Await: "`await`",
    ast.AsyncFor: "`async for`",
    ast.AsyncWith: "`async with`",
    ast.Nonlocal: "`nonlocal`",
}
