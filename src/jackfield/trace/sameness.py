"""Whether a text is the one that was compiled: whether it mentions the same names and constants on the same lines.

Bytecode itself cannot be compared: a block is compiled as a function of its own, in which names live elsewhere.
"""

import ast
import dis
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, TypeGuard, cast

from jackfield.trace.compiling import Place, first_line, statements_code

# Where variables are only set up, or nothing but a return is compiled: these differ for one text.
_SETUP = frozenset({"LOAD_CLOSURE", "MAKE_CELL", "LOAD_FAST_AND_CLEAR", "RETURN_CONST"})


def is_text_of(code: CodeType, statements: list[ast.stmt], place: Place, *, exactly: bool) -> bool:
    """Whether `code` mentions on the lines of `statements` what these do; if not `exactly`, it may mention more."""
    try:
        own = statements_code(statements, code.co_name, (), place)
    except SyntaxError:  # a `break` out of the block and the like: lifting refuses it with its line
        return True
    last = statements[-1].end_lineno or statements[-1].lineno
    lines = set(range(first_line(statements[0]), last + 1)) - _lines_compiled_otherwise(statements)
    text, running = ({mention for mention in _mentioned(part) if mention[0] in lines} for part in (own, code))
    return text == running if exactly else text <= running


def _lines_compiled_otherwise(statements: list[ast.stmt]) -> set[int]:
    """Modules evaluate annotations of variables; `return` leaves the `with` first; `super()` needs its class."""
    own = [node for node in _own_nodes(statements) if isinstance(node, ast.AnnAssign | ast.Return) or _is_super(node)]
    return {line for node in own for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _is_super(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a block that are not of a function or class inside it."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(ast.iter_child_nodes(node))


def _mentioned(code: CodeType) -> set[tuple[int | None, str]]:
    """The names and constants that `code`, and the functions inside it, mention, with their lines."""
    found: set[tuple[int | None, str]] = set()
    for instruction in _without_qualified_name(dis.get_instructions(code)):
        line = instruction.positions.lineno if instruction.positions else None
        found |= {(line, mention) for mention in _mentions(instruction, code)}
    # Not out of co_consts, which may keep the functions of a branch that is never compiled (`if 0:`).
    loaded = (instruction.argval for instruction in dis.get_instructions(code))
    inner = [constant for constant in loaded if isinstance(constant, CodeType)]
    return found.union(*(_mentioned(constant) for constant in inner))


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
