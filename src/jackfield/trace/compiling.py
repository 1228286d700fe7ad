"""Statements and functions of a user's text compiled again, with their own file, lines and private names."""

import __future__

import ast
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)

_ANNOTATIONS = __future__.annotations.compiler_flag
_NAME_FIELDS = ("id", "attr", "name", "asname", "rest")


@dataclass(frozen=True, slots=True)
class Place:
    """Where code stands: its file, the class whose body it is in (for private names), how it was compiled."""

    filename: str
    owner: str | None
    flags: int


def first_line(statement: ast.stmt) -> int:
    """The line on which a statement begins to run; decorators stand before their `def`."""
    decorators: Iterable[ast.expr] = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def own_copy(node: Node, place: Place) -> Node:
    """A copy of `node` in which private names are written as its class would have them: `__x` is `_Owner__x`."""
    return _Private(place.owner).visit(copy.deepcopy(node))


def statements_code(statements: Iterable[ast.stmt], name: str, parameters: Sequence[str], place: Place) -> CodeType:
    """The code of a function of `parameters` whose body is a copy of `statements`."""
    body = [own_copy(statement, place) for statement in statements]
    return _nested(_code(_function(name, parameters, body), place), name)


def function_code(node: ast.FunctionDef | ast.Lambda, free: Sequence[str], place: Place) -> CodeType:
    """The code of the function that `node` makes, in a scope that has the variables `free`."""
    node = own_copy(node, place)
    if isinstance(node, ast.FunctionDef):
        node.decorator_list = []
    body: list[ast.stmt] = [ast.copy_location(ast.Expr(node), node)] if isinstance(node, ast.Lambda) else [node]
    scope = _nested(_code(_function("scope", free, body), place), "scope")
    return _nested(scope, "<lambda>" if isinstance(node, ast.Lambda) else node.name)


def _function(name: str, parameters: Iterable[str], body: list[ast.stmt]) -> ast.FunctionDef:
    arguments = ast.arguments([], [ast.arg(parameter) for parameter in parameters], None, [], [], None, [])
    node = ast.FunctionDef(name=name, args=arguments, body=body, decorator_list=[])
    setattr(node, "type_params", [])  # noqa: B010 - asked for from Python 3.12 on, unknown to the checker before
    return ast.copy_location(node, body[0])


def _code(node: ast.FunctionDef, place: Place) -> CodeType:
    module = ast.fix_missing_locations(ast.Module([node], []))
    return compile(module, place.filename, "exec", flags=place.flags & _ANNOTATIONS, dont_inherit=True)


def _nested(code: CodeType, name: str) -> CodeType:
    """The function `name` made directly by `code`. The last one: a default value may hold a lambda of its own."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType) and constant.co_name == name][-1]


class _Private(ast.NodeTransformer):
    """Writes private names out, since the class around them is not compiled with them."""

    def __init__(self, owner: str | None) -> None:
        self.owner = owner

    def visit(self, node: ast.AST) -> Any:
        if self.owner is None:
            return node
        for field in (*_NAME_FIELDS, "arg") if isinstance(node, ast.arg) else _NAME_FIELDS:
            name = getattr(node, field, None)
            if isinstance(name, str) and name.startswith("__") and not name.endswith("__") and "." not in name:
                setattr(node, field, f"_{self.owner.lstrip('_')}{name}")
        return self._inner_class(node) if isinstance(node, ast.ClassDef) else self.generic_visit(node)

    def _inner_class(self, node: ast.ClassDef) -> ast.ClassDef:
        """The compiler does the body of a class by itself; what stands before it is outside that class."""
        node.bases = [self.visit(base) for base in node.bases]
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        return node
