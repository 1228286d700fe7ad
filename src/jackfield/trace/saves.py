"""`x = value.save()`, wherever it binds a name, becomes a call that saves `value` under "x".

The rewriting is by syntax alone, so that any object can be saved: nothing is asked of its class.
"""

import ast
from collections.abc import Iterable
from typing import Any

from jackfield.errors import UnboundSave

SAVE = ".save"  # called with a name and a value, gives the value back; no name that a user writes can hide it


class Saves(ast.NodeTransformer):
    """Rewrites the saves of one block; `names` are those it saves, in order.

    `tracers` are the names that are `t` in the block: `t.save(name=x)` stays as it is. A save that binds no name
    raises UnboundSave with its line, found at `filename`.
    """

    def __init__(self, filename: str, tracers: frozenset[str]) -> None:
        self.names: list[str] = []
        self._filename, self._tracers = filename, tracers

    def rewrite(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        """The statements with their saves rewritten; the given ones are used up."""
        made: list[ast.stmt] = []
        for statement in statements:
            new: ast.stmt | list[ast.stmt] = self.visit(statement)
            made.extend(new if isinstance(new, list) else [new])
        return made

    def visit_Assign(self, node: ast.Assign) -> Any:
        unpacked = [target for target in node.targets if isinstance(target, ast.Tuple | ast.List)]
        saved = self._saved(node.value)
        if saved is not None and unpacked:
            return self._unpack(node, saved)
        for target in node.targets:
            node.value = self._bound(node.value, target)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self._bound(node.value, node.target)
        return self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        node.value = self._bound(node.value, node.target)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        """A bare `x.save()`: the name is bound already."""
        parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        bare = [self._bound(part, self._saved(part) or part) for part in parts]
        node.value = ast.copy_location(ast.Tuple(bare, ast.Load()), node.value) if len(bare) != 1 else bare[0]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if self._saved(node) is not None:
            raise self._unbound(node, "binds to no name")
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self._visit_inner(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self._visit_inner(node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return self._visit_inner(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._visit_inner(node)

    def _visit_inner(self, node: ast.AST) -> ast.AST:
        for inside in ast.walk(node):
            if self._saved(inside) is not None:
                raise self._unbound(inside, "stands in an inner function or class, whose names are not the block's")
        return node

    def _bound(self, value: ast.expr, target: ast.expr) -> ast.expr:
        """`value` as it is assigned to `target`: a save there is a save under the target's name."""
        if isinstance(value, ast.IfExp):
            value.body, value.orelse = self._bound(value.body, target), self._bound(value.orelse, target)
        saved = value if _is_rewritten(value) else self._saved(value)  # rewritten: for `a`, in a = b = x.save()
        if isinstance(target, ast.Name) and saved is not None:
            return self._save(saved, target.id, value)
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            self._pair(value, target.elts)
        return value

    def _pair(self, value: ast.Tuple | ast.List, targets: list[ast.expr]) -> None:
        """Pairwise, up to a star."""
        if len(value.elts) == len(targets) and not any(isinstance(e, ast.Starred) for e in (*value.elts, *targets)):
            value.elts = [self._bound(element, target) for element, target in zip(value.elts, targets, strict=True)]

    def _unpack(self, node: ast.Assign, saved: ast.expr) -> list[ast.stmt]:
        """`a, b = pair.save()`: the pair is taken apart first, then each name is saved."""
        parts = [part for target in node.targets for part in _parts(target)]
        if not all(isinstance(part, ast.Name) for part in parts):
            raise self._unbound(node.value, "is taken apart into what is no name")
        loads = [ast.Name(part.id, ast.Load()) for part in parts if isinstance(part, ast.Name)]
        saves = [ast.Expr(self._save(load, load.id, node.value)) for load in loads]
        node.value = saved
        self.generic_visit(node)
        return [node, *(ast.copy_location(save, node) for save in saves)]

    def _save(self, value: ast.expr, name: str, at: ast.expr) -> ast.Call:
        if name not in self.names:
            self.names.append(name)
        call = ast.Call(ast.Name(SAVE, ast.Load()), [ast.Constant(name), value], [])
        return ast.fix_missing_locations(ast.copy_location(call, at))

    def _saved(self, node: ast.AST) -> ast.expr | None:
        """What `node` saves, if it is a `value.save()`."""
        if not isinstance(node, ast.Call) or node.args or node.keywords or not isinstance(node.func, ast.Attribute):
            return None
        value = node.func.value
        is_tracer = isinstance(value, ast.Name) and value.id in self._tracers
        return value if node.func.attr == "save" and not is_tracer else None

    def _unbound(self, save: ast.AST, reason: str) -> UnboundSave:
        text = ast.unparse(save)
        value, line = text.removesuffix(".save()"), getattr(save, "lineno", None)
        return UnboundSave(
            f"{self._filename}:{line}: the save in `{text}` {reason}, so it would be lost. Bind it to a name of "
            f"the block, `x = {text}`. Several go into one list: `rows = list().save()`, then `rows.append({value})`."
        )


def _is_rewritten(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == SAVE


def _parts(target: ast.expr) -> list[ast.expr]:
    """What a target assigns to, without the tuples, lists and stars around it."""
    if isinstance(target, ast.Tuple | ast.List):
        return [part for element in target.elts for part in _parts(element)]
    return _parts(target.value) if isinstance(target, ast.Starred) else [target]
