"""One prompt through a model with everything listened to: which module was called with what, and gave what.

For reading an anatomy off, and for nothing else: requests are listened to by hooks that are put up where a block wants
them. Tensors are copied when they pass, for a model may go on to change them in place; the tensor itself is kept beside
its copy, so that a later argument can be told to be the same object. The model is left as it was found.
"""

import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast  # Any: the arguments and results of foreign functions are whatever they take and give

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from jackfield.errors import UnsupportedModel

PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum", "linear", "addmm"})
_WEIGHTED = frozenset({"linear", "addmm"})
"""Products with a weight: large, and of no interest."""

SQUASHES = frozenset({"softmax", "sigmoid", "topk", "sort", "softplus", "tanh"})
ATTENTION_OPERATION = "scaled_dot_product_attention"
_WATCHED = PRODUCTS | SQUASHES | {ATTENTION_OPERATION}
_OPERANDS = ("query", "key", "value", "attention_mask")


_Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A tensor as it was when it passed: a copy in host memory, and the tensor itself."""

    value: Tensor
    origin: Tensor

    @property
    def rows(self) -> Tensor:
        """[rows, width]."""
        return self.value.reshape(-1, self.value.shape[-1]) if self.value.ndim else self.value.reshape(1, 1)

    def equals(self, other: "Seen") -> bool:
        """Whether both hold the same rows, bit for bit, in whatever shape and dtype."""
        mine, theirs = self.rows, other.rows
        return mine.shape == theirs.shape and torch.equal(mine.float(), theirs.float())

    def shares(self, other: "Seen") -> bool:
        """Whether both are one tensor, or one a view of all of the other."""
        return self.origin is other.origin or (
            self.origin.data_ptr() == other.origin.data_ptr() and self.origin.numel() == other.origin.numel()
        )


@dataclass(slots=True, eq=False)
class Call:
    """One call of one module. Arguments are by parameter name; a starred one is by position.

    `nested` are tensors inside tuples and lists, which no Site can name.
    `start` and `end` order all events of a recording: one call lies inside another where its span does.
    """

    path: str
    module: nn.Module
    start: int
    end: int = -1
    first: str | int | None = None
    arguments: dict[str | int, Seen] = field(default_factory=dict[str | int, Seen])
    nested: list[Seen] = field(default_factory=list[Seen])
    results: dict[int, Seen] = field(default_factory=dict[int, Seen])
    is_tensor: bool = False

    @property
    def result(self) -> Seen | None:
        """The result, or its first item."""
        return self.results.get(0)

    @property
    def argument(self) -> Seen | None:
        """The first argument that holds real numbers (positions and masks of other kinds may stand before it)."""
        given = [*self.arguments.values(), *self.nested]
        return next((seen for seen in given if seen.value.is_floating_point()), None)

    def argument_key(self, seen: Seen | None) -> str | int | None:
        """How a Site names the argument `seen`: None for the first parameter."""
        name = next((name for name, other in self.arguments.items() if other is seen), self.first)
        return None if name == self.first else name

    def holds(self, other: "Call") -> bool:
        """Whether `other` ran inside this call."""
        return self.start < other.start and other.end < self.end


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One tensor operation, inside the innermost module at `path`. A product with a weight has no inputs here."""

    name: str
    path: str
    index: int
    inputs: tuple[Seen, ...]
    output: Seen
    keywords: Mapping[str, object]
    equation: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class InterfaceCall:
    """One call of the attention interface by the module at `path`."""

    path: str
    index: int
    queries: Seen
    keys: Seen
    values: Seen
    keywords: Mapping[str, object]
    result: Seen | None


@dataclass(slots=True, eq=False)
class Recording:
    """Everything that was seen while one prompt of `tokens` tokens passed."""

    tokens: int
    calls: list[Call] = field(default_factory=list[Call])
    operations: list[Operation] = field(default_factory=list[Operation])
    interface_calls: list[InterfaceCall] = field(default_factory=list[InterfaceCall])
    cache: object = None

    def calls_of(self, path: str) -> list[Call]:
        """The calls of the module at `path`, in order."""
        return [call for call in self.calls if call.path == path]

    def below(self, call: Call) -> list[Call]:
        """The calls inside `call`, in order."""
        return [other for other in self.calls if call.holds(other)]


def record(model: PreTrainedModel, ids: Tensor) -> Recording:
    """Run `ids` [1, token] through `model` and say all that was seen.

    Gradients are off, dropout too; the model's mode, its hooks, the random generators and the attention interfaces are
    put back, also after an error.

    Raises:
        UnsupportedModel: the model's forward fails on a plain prompt.
    """
    listener = _Listener(model, ids.shape[1])
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_generators_kept(model))
        stack.enter_context(_evaluating(model))
        stack.enter_context(listener.hooked())
        for interface in _interfaces(model):
            stack.enter_context(listener.listening(interface))
        stack.enter_context(_Operations(listener))
        try:
            output = model(**_inputs(model, ids))
        except Exception as error:
            raise UnsupportedModel(
                f"Looked for the parts of {type(model).__name__} with a prompt of {ids.shape[1]} tokens, and its "
                f"forward raised {type(error).__name__}: {error}. Load a model that runs on plain token ids."
            ) from error
    listener.recording.cache = getattr(output, "past_key_values", None)  # ModelOutput; a bare tuple has none
    return listener.recording


class _Listener:
    """Turns what passes into a Recording."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.recording = Recording(tokens)
        self.muted = False
        self._modules = {path: module for path, module in modules_of(model).items() if path}
        self._paths = {id(module): path for path, module in self._modules.items()}
        self._open: list[Call] = []
        self._parameters: dict[object, tuple[inspect.Signature, str | int | None]] = {}
        self._events = 0

    @contextmanager
    def hooked(self) -> Generator[None]:
        handles = [
            handle
            for module in self._modules.values()
            for handle in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def listening(self, interface: AttentionInterface) -> Generator[None]:
        """Hear every function that `interface` hands out, by name or by `get_interface`; passive for other models."""
        own = cast("Callable[[str, _Function], _Function]", interface.get_interface)
        table: dict[str, _Function] = interface._local_mapping  # pyright: ignore[reportPrivateUsage]  # 5.0 to 5.19
        before = dict(table)

        def get_interface(attn_implementation: str, default: _Function) -> _Function:
            return self._heard(own(attn_implementation, default))

        for name in cast("list[str]", list(interface)):
            table[name] = self._heard(cast("_Function", interface[name]))
        interface.get_interface = get_interface  # on the instance: the class stays as it is
        try:
            yield
        finally:
            del interface.get_interface
            table.clear()
            table.update(before)

    def operation(self, name: str, arguments: Sequence[object], keywords: Mapping[str, object], output: object) -> None:
        if self.muted or not self._open:
            return
        output = cast("tuple[object, ...]", output)[0] if isinstance(output, tuple) else output
        ordered = sorted(keywords, key=lambda name: name not in _OPERANDS)  # query, key, value first; else as passed
        operands = [*arguments, *(keywords[name] for name in ordered)] if name not in _WEIGHTED else []
        inputs = tuple(_seen(item) for item in operands if isinstance(item, Tensor))
        if isinstance(output, Tensor):
            equation = next((item for item in arguments if isinstance(item, str)), None)
            rest = {key: value for key, value in keywords.items() if not isinstance(value, Tensor)}
            self.recording.operations.append(
                Operation(name, self._open[-1].path, self._tick(), inputs, _seen(output), rest, equation)
            )

    def _tick(self) -> int:
        self._events += 1
        return self._events

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call(self._paths[id(module)], module, self._tick())
        named, call.first = self._bound(module, args, kwargs)
        call.arguments = {name: _seen(value) for name, value in named.items() if isinstance(value, Tensor)}
        inside = [item for value in named.values() for item in _items(value)]
        call.nested = [_seen(item) for item in inside if isinstance(item, Tensor)]
        self.recording.calls.append(call)
        self._open.append(call)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        call = self._open.pop()
        call.end = self._tick()
        call.is_tensor = isinstance(output, Tensor)
        items = _items(output) or [output]
        call.results = {key: _seen(value) for key, value in enumerate(items) if isinstance(value, Tensor)}

    def _bound(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str | int, Any], str | int | None]:
        """The arguments by name, in the signature's order, and the name of the first parameter."""
        key = type(module) if "forward" not in vars(module) else id(module)
        if key not in self._parameters:
            self._parameters[key] = _signature(module)
        signature, first = self._parameters[key]
        bound = signature.bind(*args, **kwargs)
        named: dict[str | int, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                named |= {len(named) + place: item for place, item in enumerate(value)}
            else:
                named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return named, first

    def _heard(self, function: _Function) -> _Function:
        def hear(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if path is None or self.muted or not self._open:
                return function(module, *args, **kwargs)
            self.muted, index = True, self._tick()
            named = dict(zip(_OPERANDS, args, strict=False)) | kwargs
            queries, keys, values = (_seen(named[name]) for name in _OPERANDS[:3])
            try:
                output = function(module, *args, **kwargs)
            finally:
                self.muted = False
            heads = cast("tuple[object, ...]", output)[0] if isinstance(output, tuple) else output
            result = _seen(heads) if isinstance(heads, Tensor) else None
            keywords = {key: value for key, value in named.items() if key not in _OPERANDS}
            self.recording.interface_calls.append(InterfaceCall(path, index, queries, keys, values, keywords, result))
            return cast("object", output)

        return hear


class _Operations(TorchFunctionMode):
    """Shows a listener the products, softmaxes and selections that modules compute in their own forwards."""

    def __init__(self, listener: _Listener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")  # torch's functions are builtins, slots and Python functions
        if name in _WATCHED:
            self._listener.operation(name, args, kwargs or {}, output)
        return output


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its path; "" is the model."""
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())  # torch leaves its memo untyped
    return dict(named)


def _items(value: object) -> list[object]:
    return list(cast("Sequence[object]", value)) if isinstance(value, tuple | list) else []


def _seen(tensor: Tensor) -> Seen:
    return Seen(tensor.detach().to("cpu", copy=True), tensor)


def _signature(module: nn.Module) -> tuple[inspect.Signature, str | int | None]:
    signature = inspect.signature(module.forward)
    parameter = next(iter(signature.parameters.values()), None)
    if parameter is None or parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return signature, None
    return signature, 0 if parameter.kind is inspect.Parameter.VAR_POSITIONAL else parameter.name


def _inputs(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    name = model.main_input_name if model.main_input_name in parameters else next(iter(parameters))
    return {name: ids} | ({"use_cache": True} if "use_cache" in parameters else {})


def _interfaces(model: nn.Module) -> list[AttentionInterface]:
    """Every table of attention functions that the files of the model's classes look into."""
    files = [
        vars(sys.modules[base.__module__])
        for base in {base for module in model.modules() for base in type(module).__mro__}
        if base.__module__ in sys.modules
    ]
    forwards = (inspect.unwrap(kind.forward) for kind in {type(module) for module in model.modules()})
    files += [getattr(forward, "__globals__", {}) for forward in forwards]  # a class made by exec is in no module
    found = {
        id(value): value for file in files for value in list(file.values()) if isinstance(value, AttentionInterface)
    }
    return list(found.values())


@contextmanager
def _generators_kept(model: nn.Module) -> Generator[None]:
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
