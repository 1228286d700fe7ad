"""What an expression in a module's forward is worth, found without running the forward.

`evaluate` knows the module (attributes, properties, configuration), the constants of the file the class was written in,
and local names whose assignment can be followed back from where they are used. It calls nothing but a few functions of
numbers and containers. Whatever only a call of the module can tell (its arguments, shapes, a branch taken on them)
raises `UnresolvedExpression`: a value that may be another one at run time is never given.
"""

import ast
import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from jackfield.errors import UnresolvedExpression
from jackfield.values.definition import DEFERRED, Block, Definition, assignments, binds, leaves

_OPERATORS: Mapping[type[ast.AST], str] = MappingProxyType(
    {
        ast.Add: "add",
        ast.Sub: "sub",
        ast.Mult: "mul",
        ast.Div: "truediv",
        ast.FloorDiv: "floordiv",
        ast.Mod: "mod",
        ast.Pow: "pow",
        ast.USub: "neg",
        ast.UAdd: "pos",
        ast.Not: "not_",
        ast.Eq: "eq",
        ast.NotEq: "ne",
        ast.Lt: "lt",
        ast.LtE: "le",
        ast.Gt: "gt",
        ast.GtE: "ge",
        ast.Is: "is_",
        ast.IsNot: "is_not",
    }
)
"""The operators that can be resolved, and their names in Python's `operator`."""

# Any, here and below: an expression of a foreign class may be worth anything.
_CALLABLE: tuple[Callable[..., Any], ...] = (
    *(abs, bool, float, getattr, hasattr, int, isinstance, len, max, min, pow, round),
    *(math.exp, math.log, math.pow, math.sqrt),
)
_UNSET = object()


class _Unresolved(Exception):
    """Why an expression has no value; never leaves this file."""


def evaluate(expression: ast.expr, module: nn.Module, definition: Definition | None) -> Any:
    """The value of `expression` on `module`, as a call that `definition`, its forward, makes would pass it.

    Tensors and configuration objects are the module's own, not copies. An expression of another tree than
    `definition`'s may use the module and the constants of its file, and no local names.

    Raises:
        UnresolvedExpression: with the text of the expression, the class of the module, and the reason.
    """
    try:
        return _Evaluation(module, definition).value(expression)
    except _Unresolved as reason:
        raise unresolved(expression, module, str(reason)) from None
    except Exception as error:  # a property of the module, or an operation on its values, may raise anything
        raise unresolved(expression, module, f"{type(error).__name__}: {error}") from error


def unresolved(expression: ast.expr, module: nn.Module, reason: str) -> UnresolvedExpression:
    """The error for an expression of `module`'s forward that has no value here."""
    return UnresolvedExpression(
        f"Cannot resolve {ast.unparse(expression)!r} in {type(module).__name__}: {reason}. "
        "The attention function is given the value when the module is called; read it there."
    )


@dataclass(frozen=True, slots=True)
class _Evaluation:
    module: nn.Module
    definition: Definition | None

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript(value=container, slice=key):
                return self.value(container)[self.value(key)]
            case ast.UnaryOp(op=operation, operand=operand):
                return self._apply(operation, self.value(operand))
            case ast.BinOp(left=left, op=operation, right=right):
                return self._apply(operation, self.value(left), self.value(right))
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp():
                return self._bool(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self.value(test) else orelse)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(self.value(element) for element in elements)
            case ast.Call():
                return self._call(node)
            case _:
                raise _Unresolved(f"{ast.unparse(node)!r} is not an expression that can be read without running it")

    def _apply(self, operation: ast.AST, *operands: Any) -> Any:
        name = _OPERATORS.get(type(operation))
        if name is None:
            raise _Unresolved(f"the operator {type(operation).__name__} is not one of numbers")
        return getattr(operator, name)(*operands)

    def _compare(self, node: ast.Compare) -> Any:
        left, result = self.value(node.left), True
        for operation, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.value(comparator)
            if isinstance(operation, ast.In | ast.NotIn):
                result = (left in right) == isinstance(operation, ast.In)
            else:
                result = self._apply(operation, left, right)
            if not result:
                break
            left = right
        return result

    def _bool(self, node: ast.BoolOp) -> Any:
        result: Any = None
        for operand in node.values:
            result = self.value(operand)
            if bool(result) == isinstance(node.op, ast.Or):  # the operand that decides
                break
        return result

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return self._item(node.func.value)
        function = self.value(node.func)
        if not any(function is known for known in _CALLABLE) or any(keyword.arg is None for keyword in node.keywords):
            raise _Unresolved(f"{ast.unparse(node.func)!r} would have to be called")
        if function is getattr:
            self._refuse_reset(node)
        arguments = [self.value(argument) for argument in node.args]
        return function(*arguments, **{str(k.arg): self.value(k.value) for k in node.keywords})

    def _item(self, node: ast.expr) -> Any:
        tensor = self.value(node)
        if not isinstance(tensor, Tensor):
            raise _Unresolved(f"{ast.unparse(node)!r} is not a tensor")
        return tensor.item()

    def _attribute(self, node: ast.Attribute) -> Any:
        self._refuse_set_here(node.value, node.attr)
        return getattr(self.value(node.value), node.attr)

    def _refuse_reset(self, node: ast.Call) -> None:
        match node.args:
            case [owner, ast.Constant(value=str(attribute)), *_]:
                self._refuse_set_here(owner, attribute)
            case _:
                pass

    def _refuse_set_here(self, owner: ast.expr, attribute: str) -> None:
        definition = self.definition
        own = definition is not None and isinstance(owner, ast.Name) and owner.id == definition.receiver
        if own and definition is not None and definition.resets(attribute):
            raise _Unresolved(f"the forward sets {ast.unparse(owner)}.{attribute} itself")

    def _name(self, node: ast.Name) -> Any:
        definition = self.definition
        if definition is None:
            return self._outside_any(node)
        scopes = definition.scopes(node)
        if any(binds(scope, node.id) for scope in scopes):
            raise _Unresolved(f"{node.id!r} is set inside the expression that uses it")
        if not definition.is_local(node.id):
            return self._outside(node.id, definition)
        if node.id == definition.receiver and not definition.sets(node.id):
            return self.module
        if any(isinstance(scope, DEFERRED) for scope in scopes):
            raise _Unresolved(f"{node.id!r} is read later than where it stands")
        return self._before(node.id, node, definition)

    def _outside_any(self, node: ast.Name) -> Any:
        if node.id == "self":
            return self.module
        if not hasattr(builtins, node.id):
            raise _Unresolved(f"nothing tells what {node.id!r} is")
        return getattr(builtins, node.id)

    def _outside(self, name: str, definition: Definition) -> Any:
        """A name from around the function: its closure, the file it was written in, or a builtin."""
        if definition.sets(name):
            raise _Unresolved(f"{name!r} is set by the forward, outside itself")
        if name in definition.closure:
            return definition.closure[name].cell_contents
        if name in definition.file_names:
            return definition.file_names[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise _Unresolved(f"{name!r} is set nowhere")

    def _before(self, name: str, node: ast.AST, definition: Definition) -> Any:
        """What the local `name` holds when `node` is reached."""
        for construct in definition.constructs(node):
            if construct.disturbs(name):
                raise _Unresolved(f"{name!r} may be set on the way by {_head(construct.node)!r}")
            value = self._last(name, construct.before, definition)
            if value is not _UNSET:
                return value
        raise _Unresolved(f"{name!r} is known only when the module is called")

    def _last(self, name: str, block: Block, definition: Definition) -> Any:
        """What `name` holds at the end of `block`; `_UNSET` where the block does not set it."""
        for statement in reversed(block):
            if binds(statement, name):
                value = self._after(name, statement, definition)
                if value is not _UNSET:
                    return value
        return _UNSET

    def _after(self, name: str, statement: ast.stmt, definition: Definition) -> Any:
        """What `name` holds after a statement that sets it, perhaps on one branch only."""
        for target, value in assignments(statement):
            if target == name:
                return self.value(value)
        match statement:
            case ast.AnnAssign(target=ast.Name(), value=None):
                return _UNSET
            case ast.AugAssign(target=ast.Name(), op=operation, value=value):
                return self._apply(operation, self._before(name, statement, definition), self.value(value))
            case ast.If(test=test) if not binds(test, name):
                return self._branch(name, statement, definition)
            case _:
                raise _Unresolved(f"{name!r} is set by {_head(statement)!r}")

    def _branch(self, name: str, statement: ast.If, definition: Definition) -> Any:
        branches = [branch for branch in (statement.body, statement.orelse) if not leaves(branch)]
        if len(branches) == 2:
            branches = [statement.body if self.value(statement.test) else statement.orelse]
        return self._last(name, branches[0], definition) if branches else _UNSET


def _head(node: ast.AST) -> str:
    """The first line of a statement."""
    return ast.unparse(node).partition("\n")[0]
