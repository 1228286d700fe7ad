"""Which modules leave their attention to the attention interface of transformers, and what they pass to it.

    fuser = AttentionFuser.match(None, model.model.layers[0].self_attn)
    fuser.info("model.layers.0.self_attn")     # 'model.layers.0.self_attn (LlamaAttention) -> attention interface ...'
    fuser.scale(model.model.layers[0].self_attn)    # 0.125

A module of transformers asks a table, `ALL_ATTENTION_FUNCTIONS`, for a function and calls it with its queries, keys and
values. That call is found in the source of the module's `forward`, as a syntax tree: names, order and decorators do not
matter, and nothing runs. The expressions that the call passes are then resolved on a live module. They are what the
module's author wrote for every call; what one call passes at run time is the truth that they are checked against.

Not for modules that do their own softmax, and not for what only a run can tell: masks, positions, shapes.
"""

import ast
import functools
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jackfield.errors import UnsupportedModel
from jackfield.values.definition import Definition, assignments, define
from jackfield.values.expression import evaluate, unresolved

TABLE = "ALL_ATTENTION_FUNCTIONS"
POSITIONS = ("module", "query", "key", "value", "attention_mask", "scaling", "dropout")
"""The arguments of an attention function by position, as the eager functions of transformers 5 declare them."""

_LAYER_NAMES = ("layer_idx", "layer_index", "layer_id")  # transformers 5: 359 classes use the first, 10 the last

_OWN_ATTENTION = ("softmax", "Softmax", "scaled_dot_product_attention")


def interface_call(forward: object) -> ast.Call | None:
    """The call that `forward` makes to the attention interface, if it makes exactly one; else None.

    `forward` is a function, a bound method, a partial, or a class that has a forward; decorators are unwrapped. Where
    the source is not to be had, or does not parse, there is none. Cached: the same function gives the same node.
    """
    calls = interface_calls(forward)
    return calls[0] if len(calls) == 1 else None


def interface_calls(forward: object) -> tuple[ast.Call, ...]:
    """Every call that `forward` makes to the attention interface, in the order of the source."""
    definition = define(forward)
    return () if definition is None else _calls(definition)


def argument(call: ast.Call, name: str) -> ast.expr | None:
    """The expression that `call` passes as `name`, by keyword or by position; None where it passes none.

    A starred argument that may hold it is given as it stands, and does not resolve.
    """
    named = [keyword.value for keyword in call.keywords if keyword.arg == name]
    if named or name not in POSITIONS:
        return named[0] if len(named) == 1 else None
    place = POSITIONS.index(name)
    starred = [positional for positional in call.args[: place + 1] if isinstance(positional, ast.Starred)]
    return next(iter(starred + call.args[place : place + 1]), None)


def mismatch(forward: object) -> str | None:
    """Why `forward`, as `interface_call` takes it, does not make exactly one call; None where it does."""
    definition = define(forward)
    if definition is None:
        return "the source of its forward cannot be read"
    count = len(_calls(definition))
    if count == 1:
        return None
    if count > 1:
        return f"its forward calls the attention interface of transformers {count} times"
    own = ", it attends by itself" if _attends(definition) else ""
    return f"its forward does not call the attention interface of transformers{own}"


@dataclass(frozen=True)
class AttentionFuser:
    """One call to the attention interface in the forward of a class of attention modules.

    Attributes:
        source_cls: the class.
        scale_expr: what the call passes as `scaling`; None where it passes none.
        s_aux_expr: what it passes as `s_aux`, the attention sinks; None where it passes none.
        redefines_forward: whether fusing gives the module another forward. It does not.
        call: the call itself, for whatever else it passes.
        index: which call of the forward it is, from 0.

    The methods take any module of the class. What they resolve and cannot raises `UnresolvedExpression`, with the text
    of the expression and the name of the class; they never guess.
    """

    source_cls: type
    scale_expr: ast.expr | None
    s_aux_expr: ast.expr | None
    redefines_forward: bool = False
    call: ast.Call | None = None
    index: int = 0

    @classmethod
    def match(cls, graph: object, module: nn.Module) -> "AttentionFuser | None":
        """The fuser of a module whose forward makes exactly one call; None for any other.

        `graph`, a traced graph, may be None: a trace need not reach the call, the source always has it.
        """
        fusers = cls.match_all(module)
        return fusers[0] if len(fusers) == 1 else None

    @classmethod
    def match_all(cls, module: nn.Module) -> "tuple[AttentionFuser, ...]":
        """One fuser per call in the module's forward, in the order of the source; `index` tells them apart."""
        definition = define(module.forward)
        if definition is None:
            return ()
        return tuple(cls._of(definition, type(module), index, call) for index, call in enumerate(_calls(definition)))

    @classmethod
    def _of(cls, definition: Definition, source_cls: type, index: int, call: ast.Call) -> "AttentionFuser":
        return cls(
            source_cls=source_cls,
            scale_expr=_passed(definition, call, "scaling"),
            s_aux_expr=_passed(definition, call, "s_aux"),
            call=call,
            index=index,
        )

    def info(self, name: str) -> str:
        """A line on what was matched under the module name `name`."""
        passed = {"scaling": self.scale_expr, "s_aux": self.s_aux_expr}
        texts = [f"{key}={ast.unparse(value)}" for key, value in passed.items() if value is not None]
        which = f", call {self.index}" if self.index else ""
        return f"{name} ({self.source_cls.__name__}) -> attention interface{which}: {', '.join(texts) or 'no scaling'}"

    def validate(self, module: nn.Module, config: object) -> bool:
        """Whether the module's own configuration dispatches its attention where `config`, the language model's, does.

        A model of several parts (vision, text) may have a part with another implementation: its attention is not ours.
        False where either has no configuration or names no implementation.
        """
        own = getattr(module, "config", None)  # foreign: transformers sets it on most attention classes, not on all
        ours = _implementation(_text_config(config))
        return ours is not None and _implementation(own) == ours

    def layer_index(self, module: nn.Module) -> int | None:
        """Which layer the module says that it is; None where it does not say."""
        found = (getattr(module, name, None) for name in _LAYER_NAMES)
        return next((index for index in found if isinstance(index, int) and not isinstance(index, bool)), None)

    def scale(self, module: nn.Module) -> float | None:
        """What the scores are multiplied with, as the call passes it; None where it passes none, or None."""
        return self._number(module, self.scale_expr)

    def softcap(self, module: nn.Module) -> float | None:
        """The soft cap of the scores that the call passes; None where it passes none, or None."""
        return self._number(module, self.argument(module, "softcap"))

    def window(self, module: nn.Module) -> int | None:
        """How many keys a query sees, itself included, as the call passes it; None where it passes none, or None."""
        expression = self.argument(module, "sliding_window")
        number = self._number(module, expression)
        if expression is not None and number is not None and not number.is_integer():
            raise unresolved(expression, module, f"it is {number}, and a window is a number of keys")
        return None if number is None else int(number)

    def sinks(self, module: nn.Module) -> Tensor | None:
        """The attention sinks [heads] that the call passes, the module's own tensor; None where it passes none."""
        value = self._value(module, self.s_aux_expr)
        if self.s_aux_expr is None or value is None or isinstance(value, Tensor):
            return value
        raise unresolved(self.s_aux_expr, module, f"it is {_described(value)}, and sinks are a tensor")

    def argument(self, module: nn.Module, name: str) -> ast.expr | None:
        """The expression that the call passes as `name`, also out of a dictionary that it unpacks; None for none."""
        definition = define(module.forward)
        if self.call is None or definition is None:
            return None
        return _passed(definition, self.call, name)

    def fuse(self, module: nn.Module, tp_rank: int = 0, tp_size: int = 1) -> nn.Module:
        """The module, made ready for one of `tp_size` ranks; the same object.

        Its sinks become an empty parameter of this rank's heads [heads / tp_size], of the same dtype and device and
        without gradient, whose `weight_loader(param, loaded_weight)` takes the rank's part out of all heads' sinks.
        Without sinks nothing changes.

        Raises:
            UnresolvedExpression: the sinks are not a parameter or a buffer, but computed.
            UnsupportedModel: the heads cannot be shared out evenly, or there is no such rank.
        """
        sinks = self.sinks(module)
        if sinks is None or self.s_aux_expr is None:
            return module
        place = next(_places(module, sinks), None)
        if place is None:
            raise unresolved(
                self.s_aux_expr, module, "it is neither a parameter nor a buffer, so it cannot be replaced"
            )
        owner, name = place
        setattr(owner, name, _share(sinks, tp_rank, tp_size))
        return module

    def _number(self, module: nn.Module, expression: ast.expr | None) -> float | None:
        value = self._value(module, expression)
        if expression is None or value is None:
            return None
        number = _as_number(value)
        if number is None:
            raise unresolved(expression, module, f"it is {_described(value)}, and not one number")
        return number

    def _value(self, module: nn.Module, expression: ast.expr | None) -> Any:
        """Any: what a foreign class passes; the callers check it."""
        return None if expression is None else evaluate(expression, module, define(module.forward))


def _as_number(value: object) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    return None if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _text_config(config: object) -> object:
    """The language model's part of a configuration of several parts."""
    part = getattr(config, "get_text_config", None)  # PretrainedConfig, transformers 4.45 and later
    return part() if callable(part) else config


def _implementation(config: object) -> str | None:
    return getattr(config, "_attn_implementation", None)  # foreign: any configuration, or None


def _places(module: nn.Module, tensor: Tensor) -> Iterator[tuple[nn.Module, str]]:
    """The modules that hold `tensor`, with its name in each."""
    for owner in module.modules():
        held = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        yield from ((owner, name) for name, value in held if value is tensor)


def _share(sinks: Tensor, rank: int, size: int) -> nn.Parameter:
    heads = sinks.shape[0] if sinks.ndim else 0
    if size < 1 or not 0 <= rank < size or heads % size:
        raise UnsupportedModel(
            f"Asked for rank {rank} of {size}, found attention sinks of {heads} heads. "
            "Use ranks from 0, and a number of ranks that divides the number of heads."
        )
    share = nn.Parameter(torch.empty_like(sinks[: heads // size]), requires_grad=False)
    setattr(share, "weight_loader", functools.partial(_load_share, rank=rank, heads=heads))  # noqa: B010
    return share


def _load_share(param: Tensor, loaded_weight: Tensor, *, rank: int, heads: int) -> None:
    """Copy this rank's heads out of all heads' sinks into `param`."""
    if loaded_weight.shape != (heads, *param.shape[1:]):
        raise UnsupportedModel(
            f"Loading attention sinks: found a weight of shape {tuple(loaded_weight.shape)}, "
            f"expected {(heads, *param.shape[1:])}, the sinks of all heads."
        )
    with torch.no_grad():
        param.copy_(loaded_weight.narrow(0, rank * param.shape[0], param.shape[0]))


def _attends(definition: Definition) -> bool:
    """Whether the function takes a softmax, or calls a fused attention, under whatever name of its module."""
    called = [node.func for node in ast.walk(definition.tree) if isinstance(node, ast.Call)]
    return any(ast.unparse(function).rpartition(".")[2] in _OWN_ATTENTION for function in called)


@functools.cache
def _calls(definition: Definition) -> tuple[ast.Call, ...]:
    names = _interface_names(definition)
    calls = (node for node in ast.walk(definition.tree) if isinstance(node, ast.Call))
    found = [call for call in calls if _is_function(call.func, definition, names)]
    return tuple(sorted(found, key=lambda call: (call.lineno, call.col_offset)))


def _interface_names(definition: Definition) -> frozenset[str]:
    """The local names that hold, on some path, the table or a function out of it."""
    bound = [pair for node in ast.walk(definition.tree) for pair in assignments(node)]
    names: frozenset[str] = frozenset()
    while True:
        held = {name for name, value in bound if _is_function(value, definition, names)}
        if held <= names:
            return names
        names |= held


def _is_function(node: ast.expr, definition: Definition, names: frozenset[str]) -> bool:
    """Whether `node` is, on some path, an attention function out of the table."""
    match node:
        case ast.Name(id=name):
            return name in names
        case ast.NamedExpr(value=value):
            return _is_function(value, definition, names)
        case ast.IfExp(body=body, orelse=orelse):
            return any(_is_function(branch, definition, names) for branch in (body, orelse))
        case ast.BoolOp(values=values):
            return any(_is_function(value, definition, names) for value in values)
        case ast.Subscript(value=table):
            return _is_table(table, definition)
        case ast.Call(func=ast.Attribute(value=table, attr=attribute)):
            return attribute == "get_interface" or (attribute == "get" and _is_table(table, definition))
        case ast.Call(func=ast.Name(id="getattr"), args=[table, _, *_]):
            return _is_table(table, definition)
        case _:
            return False


def _is_table(node: ast.expr, definition: Definition) -> bool:
    """Whether `node` is the table: by its name, or by what a name of the file holds."""
    match node:
        case ast.Attribute(attr=attribute):
            return attribute == TABLE
        case ast.Name(id=name):
            # Asked of the class: a module that loads lazily would answer for itself by importing.
            return name == TABLE or hasattr(type(definition.file_names.get(name)), "get_interface")
        case _:
            return False


def _passed(definition: Definition, call: ast.Call, name: str) -> ast.expr | None:
    """What `call` passes as `name`: itself, or out of a dictionary that it unpacks."""
    direct = argument(call, name)
    if direct is not None:
        return direct
    unpacked = [keyword.value for keyword in call.keywords if keyword.arg is None]
    found = (_entry(definition, value, name) for value in unpacked)
    return next((value for value in found if value is not None), None)


def _entry(definition: Definition, unpacked: ast.expr, name: str) -> ast.expr | None:
    """What a dictionary unpacked into the call holds under `name`; None for nothing.

    The forward's own `**kwargs` count as nothing: they are the caller's. A dictionary that cannot be read is given as
    a lookup in it, which does not resolve.
    """
    if isinstance(unpacked, ast.Name) and unpacked.id == definition.keywords:
        return None
    display = _display(definition, unpacked)
    if display is None:
        return ast.Subscript(value=unpacked, slice=ast.Constant(name), ctx=ast.Load())
    return display.get(name)


def _display(definition: Definition, node: ast.expr) -> Mapping[str, ast.expr] | None:
    """The entries of a dictionary written out in the forward, with constant keys, and never changed after."""
    if isinstance(node, ast.Name):
        bound = [value for part in ast.walk(definition.tree) for key, value in assignments(part) if key == node.id]
        if len(bound) != 1 or _is_changed(definition, node.id):
            return None
        node = bound[0]
    if not isinstance(node, ast.Dict):
        return None
    keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
    return dict(zip(map(str, keys), node.values, strict=True)) if all(isinstance(k, str) for k in keys) else None


def _is_changed(definition: Definition, name: str) -> bool:
    """Whether the forward touches the dictionary `name` otherwise than by unpacking it."""
    uses = [n for n in ast.walk(definition.tree) if isinstance(n, ast.Name) and n.id == name]
    loads = [use for use in uses if isinstance(use.ctx, ast.Load)]
    return any(not isinstance(definition.parents.get(use), ast.keyword) for use in loads)
