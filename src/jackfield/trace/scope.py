"""Which names a block takes from outside, and which outside objects it changes.

One walk in the order of evaluation. A name is *bound* where it certainly has a value of the block's own; a name read
before that needs the outside value to start from. A name is *the block's own* from its first assignment on.
"""

import ast
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Method names by which lists, dicts, sets and deques change themselves.
_OF_LISTS = "append appendleft extend extendleft insert remove pop popleft clear sort reverse rotate"
_OF_SETS = "add discard update difference_update intersection_update symmetric_difference_update"
_CHANGING = frozenset(f"{_OF_LISTS} {_OF_SETS} setdefault popitem".split())


@dataclass(frozen=True, slots=True)
class Change:
    """A statement that changes the object `owner`, reached from `name`, which the block has not assigned before."""

    name: str
    owner: ast.expr
    how: str  # "part": an item or attribute is set; "in place": `owner += ...`; else the method that is called
    line: int
    text: str


class Scope(ast.NodeVisitor):
    """The names of one block. `early` are those read where the block may not have bound them yet."""

    def __init__(self, parameters: Iterable[str] = ()) -> None:
        self.early: set[str] = set()
        self.changes: list[Change] = []
        self._bound: set[str] = set(parameters)
        self._own: set[str] = set(parameters)

    def walk(self, statements: Iterable[ast.AST]) -> None:
        """Visits in order."""
        for statement in statements:
            self.visit(statement)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self._bound:
            self.early.add(node.id)
        elif isinstance(node.ctx, ast.Store):
            self._bind(node.id)
        elif isinstance(node.ctx, ast.Del):
            self._bound.discard(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._visit_part(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._visit_part(node)

    def _visit_part(self, node: ast.Attribute | ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._change(node.value, "part", node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and _changes_itself(node.func.attr):
            self._change(node.func.value, node.func.attr, node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.walk([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # alone it is no assignment, and a function does not evaluate the annotation
            self.walk([node.value, node.target])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._change(node.target, "in place", node)
            self.visit(ast.Name(node.target.id, ast.Load()))
        self.walk([node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.walk([node.value, node.target])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches([node.body], [node.orelse])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._branches([[node.body]], [[node.orelse]])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._branches([node.values[1:]], [])

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._branches([[node.target], node.body], [])
        self._branches([node.orelse], [])

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._branches([node.body], [node.orelse])

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        before = set(self._bound)
        self._branches([node.body, node.orelse], *([handler.body] for handler in self._handlers(node)))
        after, self._bound = self._bound, before  # what `finally` sees may be as early as this
        self.walk(node.finalbody)
        self._bound |= after

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self.visit_Try(node)

    def _handlers(self, node: ast.Try | ast.TryStar) -> Iterator[ast.ExceptHandler]:
        for handler in node.handlers:
            if handler.type is not None:
                self.visit(handler.type)
            if handler.name is not None:
                self._own.add(handler.name)
            yield handler

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.walk([item.context_expr, *([item.optional_vars] if item.optional_vars else [])])
        self._branches([node.body], [])  # it may swallow what its body raises

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            self._branches([[case.pattern], [case.guard] if case.guard else [], case.body], [])

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self._bind(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self.visit_MatchAs(node)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self._bind(node.rest)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._bind(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.visit_Import(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.walk([*node.decorator_list, *_defaults(node.args)])
        self._bind(node.name)
        self._inner(node, node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.walk(_defaults(node.args))
        self._inner(node, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.walk([*node.decorator_list, *node.bases, *node.keywords])
        self._inner(node, node.body)
        self._bind(node.name)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node.generators, [node.elt])

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self.visit_ListComp(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self.visit_ListComp(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node.generators, [node.key, node.value])

    def _comprehension(self, generators: list[ast.comprehension], results: list[ast.expr]) -> None:
        self.visit(generators[0].iter)
        with self._restored():
            for generator in generators:
                self.walk([generator.target, *generator.ifs])
            self.walk(generator.iter for generator in generators[1:])
            self.walk(results)

    def _inner(self, node: ast.AST, body: Iterable[ast.AST]) -> None:
        """The body of a function or class: its variables are its own, and it may run before the block binds more."""
        with self._restored():
            self._own |= {
                name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
            parameters = {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}
            self._own |= parameters
            self._bound |= parameters
            self.walk(body)

    def _branches(self, *branches: Iterable[Iterable[ast.AST]]) -> None:
        """Ways that the block may go: bound afterwards is what all of them bind."""
        before: set[str] = set(self._bound)
        outcomes: list[set[str]] = []
        for branch in branches:
            self._bound = set(before)
            for part in branch:
                self.walk(part)
            outcomes.append(self._bound)
        self._bound = outcomes[0].intersection(*outcomes[1:])

    @contextmanager
    def _restored(self) -> Generator[None]:
        bound, own = set(self._bound), set(self._own)
        yield
        self._bound, self._own = bound, own

    def _bind(self, name: str) -> None:
        self._bound.add(name)
        self._own.add(name)

    def _change(self, owner: ast.expr, how: str, node: ast.expr | ast.stmt) -> None:
        root = _root(owner)
        if root is not None and root not in self._own:
            self.changes.append(Change(root, owner, how, node.lineno, ast.unparse(node)))


def _changes_itself(method: str) -> bool:
    """Methods of torch that work in place end in an underscore; asking for gradients changes no number."""
    return method in _CHANGING or (method.endswith("_") and not method.startswith("_") and method != "requires_grad_")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _defaults(arguments: ast.arguments) -> list[Any]:
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]
