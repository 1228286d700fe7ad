"""The text of a forward, parsed once: its statements, what encloses what, and which statement sets which name.

It only reads. What an expression is worth on a live module is the business of `expression.py`.
"""

import ast
import functools
import inspect
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

Block = list[ast.stmt]
DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)
"""What runs later than where it stands, or more than once."""
_SCOPES = (*DEFERRED, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp)


@dataclass(frozen=True, eq=False, slots=True)
class Construct:
    """A statement, or a part of one with a block of its own, and the statements before it in its block."""

    node: ast.AST
    before: Block

    def disturbs(self, name: str) -> bool:
        """Whether reaching something inside the construct may have set `name`; a plain assignment is done after."""
        if isinstance(self.node, ast.If):
            return binds(self.node.test, name)
        if isinstance(self.node, ast.Match) or any(blocks(self.node)):
            return binds(self.node, name)
        return any(isinstance(part, ast.NamedExpr) and binds(part.target, name) for part in ast.walk(self.node))


@dataclass(frozen=True, eq=False, slots=True)
class Definition:
    """A function: its syntax tree, the parent of every node, its code, and the names it finds around itself."""

    tree: ast.FunctionDef | ast.AsyncFunctionDef
    parents: Mapping[ast.AST, ast.AST]
    code: CodeType
    file_names: Mapping[str, object]
    closure: Mapping[str, CellType]

    @property
    def receiver(self) -> str | None:
        """The name of the first argument: `self`, by custom."""
        arguments = self.tree.args.posonlyargs + self.tree.args.args
        return arguments[0].arg if arguments else None

    @property
    def keywords(self) -> str | None:
        """The name of the argument that gathers the other keywords: `kwargs`, by custom."""
        return self.tree.args.kwarg.arg if self.tree.args.kwarg else None

    def sets(self, name: str) -> bool:
        """Whether `name` is set in the body, arguments aside."""
        return any(binds(statement, name) for statement in self.tree.body)

    def is_local(self, name: str) -> bool:
        """Whether `name` is an argument or is set somewhere in the function."""
        return name in self.code.co_varnames or name in self.code.co_cellvars

    def resets(self, attribute: str) -> bool:
        """Whether the function sets `self.<attribute>` itself: what the module holds now may not be what it uses."""
        return any(
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr == attribute
            and isinstance(node.value, ast.Name)
            and node.value.id == self.receiver
            for node in ast.walk(self.tree)
        )

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """What encloses `node`, innermost first, up to and without the function itself."""
        while (parent := self.parents.get(node)) is not None and parent is not self.tree:
            yield parent
            node = parent

    def constructs(self, node: ast.AST) -> Iterator[Construct]:
        """The constructs that `node` is, or is in, innermost first. None for a node of another tree."""
        for inner in (node, *self.ancestors(node)):
            owner = self.parents.get(inner)
            if owner is not None and isinstance(inner, ast.stmt | ast.ExceptHandler | ast.match_case):
                siblings = next((block for block in blocks(owner) if inner in block), Block())
                yield Construct(inner, siblings[: _place(inner, siblings)])

    def scopes(self, node: ast.AST) -> list[ast.AST]:
        """The functions, classes and comprehensions inside this function that `node` is in."""
        return [ancestor for ancestor in self.ancestors(node) if isinstance(ancestor, _SCOPES)]


def _place(node: ast.AST, block: Block) -> int:
    return next((place for place, statement in enumerate(block) if statement is node), 0)


def underlying(forward: object) -> FunctionType | None:
    """The function in which a forward was written: out of its class, its binding, its partials and its decorators.

    None for a callable that was not written in Python, and for decorators that lead back to themselves.
    """
    if isinstance(forward, type):
        forward = getattr(forward, "forward", None)  # foreign: any class may be asked
    try:
        while not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
            if isinstance(forward, functools.partial):
                forward = cast("object", forward.func)
            elif isinstance(forward, MethodType):
                forward = forward.__func__
            elif callable(forward) and hasattr(forward, "__wrapped__"):
                forward = inspect.unwrap(forward)
            else:
                return None
    except ValueError:  # what inspect.unwrap says of a circle
        return None
    return forward


def define(forward: object) -> Definition | None:
    """The definition of a forward; None where Python kept no source, or where it does not parse."""
    function = underlying(forward)
    return None if function is None else _define(function)


@functools.cache
def _define(function: FunctionType) -> Definition | None:
    tree = _parse(function)
    if tree is None:
        return None
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    code = function.__code__
    closure = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    return Definition(tree, parents, code, function.__globals__, closure)


def _parse(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    try:
        source = inspect.getsource(function)
        # Under an `if` rather than dedented: strings over several lines may begin left of the function.
        [statement] = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source).body
    except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):
        return None
    if isinstance(statement, ast.If):
        statement = statement.body[0]
    # Under another name the file has changed since it was imported, and this is not the text that runs.
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == function.__code__.co_name:
        return statement
    return None


def blocks(owner: ast.AST) -> Iterator[Block]:
    """The lists of statements that `owner` holds itself."""
    for field in ("body", "orelse", "finalbody"):
        block: Any = getattr(owner, field, None)  # a list of statements, or one expression (of a lambda or a ternary)
        if isinstance(block, list):
            yield cast("Block", block)


def leaves(block: Block) -> bool:
    """Whether what follows `block` is never reached from it."""
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def binds(node: ast.AST, name: str) -> bool:
    """Whether `name` is set, or deleted, anywhere inside `node`."""
    return any(name in _bound(part) for part in ast.walk(node))


def _bound(node: ast.AST) -> tuple[str | None, ...]:
    """The names that `node` by itself sets."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return (name,)
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return tuple((alias.asname or alias.name).partition(".")[0] for alias in names)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return (name,)
        case ast.MatchMapping(rest=name):
            return (name,)
        case ast.arg(arg=name):
            return (name,)
        case _:
            return ()


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment, annotated or not, or a walrus sets to one expression each, with that expression."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _paired(target, value)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            yield name, value
        case _:
            pass


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ((ast.Tuple(elts=left) | ast.List(elts=left)), (ast.Tuple(elts=right) | ast.List(elts=right))):
            if len(left) == len(right) and not any(isinstance(e, ast.Starred) for e in (*left, *right)):
                for one, other in zip(left, right, strict=True):
                    yield from _paired(one, other)
        case _:
            pass
