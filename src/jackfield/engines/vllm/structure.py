"""Where taps go in one of vLLM's models: found by what modules are and how they hang together, never by their names.

The attention op is vLLM's own class, which every model uses; the block is the member of a ModuleList around it. What
each tap's tensor means is not decided here but by numbers, on a probe prompt (`reading.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from jackfield.engines.vllm.taps import named, tap_inputs, tap_outputs
from jackfield.errors import UnsupportedModel
from jackfield.interleave.site import Port, Site


@dataclass(frozen=True, slots=True)
class BlockStructure:
    """One decoder block by its paths. `op` is vLLM's attention layer, `attention` the block's child that holds it."""

    path: str
    attention: str | None
    op: str | None
    norms: tuple[str, ...]
    sublayers: tuple[str, ...]  # children that are neither the attention nor norms
    projections: tuple[str, ...]  # row-parallel linear modules inside: output and down projections
    routers: tuple[str, ...]
    makers: tuple[str, ...]  # what may make queries and keys: linear modules and norms in the attention
    reason: str | None = None  # why the attention's values are not to be had


@dataclass(frozen=True, slots=True)
class Structure:
    """A whole decoder. `layers` is the path of the list of blocks."""

    blocks: tuple[BlockStructure, ...]
    embedding: str | None
    final_norms: tuple[str, ...]


def read_structure(model: nn.Module, ops: Mapping[str, Any]) -> Structure:
    """The structure of a loaded model; `ops` are its attention layers, as vLLM keeps them, by their own names.

    UnsupportedModel where no list of decoder blocks holds an attention op.
    """
    modules = named(model)
    paths = {id(module): path for path, module in reversed(list(modules.items()))}
    held = {paths[id(op)]: op for op in ops.values() if id(op) in paths}
    lists = [found for path in held if (found := _enclosing_list(path, modules)) is not None]
    if not lists:
        raise UnsupportedModel(
            f"{type(model).__name__}: no list of blocks with an attention of vLLM's was found in it, so no value has a "
            "place here."
        )
    most = max(set(lists), key=lists.count)
    blocks = tuple(_block(f"{most}.{name}", modules, held) for name, _ in modules[most].named_children())
    owner = most.rpartition(".")[0]
    around = [(f"{owner}.{name}".lstrip("."), child) for name, child in modules[owner].named_children()]
    return Structure(blocks, _embedding(modules), tuple(path for path, child in around if is_norm(child)))


def _embedding(modules: Mapping[str, nn.Module]) -> str | None:
    """The embedding of tokens: a head is one as well, by its class."""
    found = (path for path, module in modules.items() if _kind(module, "VocabParallelEmbedding"))
    return next((path for path in found if not _kind(modules[path], "ParallelLMHead")), None)


def _enclosing_list(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The outermost ModuleList that `path` is in."""
    parts = path.split(".")
    heads = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((head for head in heads if isinstance(modules[head], nn.ModuleList)), None)


def _block(path: str, modules: Mapping[str, nn.Module], ops: Mapping[str, Any]) -> BlockStructure:
    inside = [other for other in modules if other.startswith(f"{path}.")]
    held = [other for other in inside if other in ops]
    op = held[0] if len(held) == 1 else None
    reason = None if op else "this layer attends more than once" if held else "this layer has no attention"
    attention = None if op is None else f"{path}.{op[len(path) + 1 :].split('.')[0]}"
    if attention == op:
        attention = path  # the block itself holds the op
    children = [f"{path}.{name}" for name, _ in modules[path].named_children()]
    norms = tuple(child for child in children if is_norm(modules[child]))
    rest = tuple(child for child in children if child not in norms and child not in (attention, op))
    return BlockStructure(
        path,
        attention,
        op,
        norms,
        rest,
        _projections(inside, [path for path in (attention, *rest) if path not in (None, op)], modules),
        tuple(other for other in inside if _is_router(other, modules)),
        tuple(other for other in inside if _makes(modules[other], other, attention)),
        reason if op is None else _unheard(ops[op]),
    )


def _unheard(op: Any) -> str | None:
    """Why an attention layer's values are not to be had."""
    if not is_listened_to(op):
        return f"its attention, {type(op).__name__}, is not given queries, keys and values of heads"
    if getattr(op, "kv_sharing_target_layer_name", None) is not None:  # Gemma 3n and 4
        return "it attends to the keys of another layer, and is given none of its own"
    return None


def is_listened_to(op: Any) -> bool:
    """Whether an attention layer takes queries, keys and values; latent attention keeps something else."""
    return hasattr(getattr(op, "impl", None), "forward")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: every one in vLLM and in torch says so in its class's name."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _projections(
    inside: Sequence[str], sublayers: Sequence[str | None], modules: Mapping[str, nn.Module]
) -> tuple[str, ...]:
    """Output and down projections: row-parallel modules and, in sublayers without one, what goes back to the width."""
    found = [path for path in inside if is_projection(modules[path])]
    bare = [owner for owner in sublayers if owner and not any(path.startswith(owner) for path in found)]
    backs = (_back([modules[path] for path in inside if path.startswith(f"{owner}.")]) for owner in bare)
    paths = {id(modules[path]): path for path in inside}
    return tuple(found + [paths[id(back)] for back in backs if back is not None])


def _back(modules: Sequence[nn.Module]) -> nn.Module | None:
    """The last linear module, if it gives the width that the first one takes; vLLM's are not always row-parallel."""
    linear: list[Any] = [module for module in modules if _kind(module, "LinearBase")]
    return linear[-1] if len(linear) > 1 and linear[-1].output_size == linear[0].input_size else None


def _makes(module: nn.Module, path: str, attention: str | None) -> bool:
    is_linear = (_kind(module, "LinearBase") or isinstance(module, nn.Linear)) and not is_projection(module)
    return attention is not None and path.startswith(f"{attention}.") and (is_linear or is_norm(module))


def is_projection(module: nn.Module) -> bool:
    """Whether a module is an output or a down projection: its input is what is cut over ranks."""
    return _kind(module, "RowParallelLinear")


def _is_router(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """A plain linear beside fused experts; its name is vLLM's convention for all of them."""
    owner = path.rpartition(".")[0]
    siblings = modules[owner].children()
    is_linear = isinstance(getattr(modules[path], "weight", None), Tensor) and not is_norm(modules[path])
    return (
        is_linear and any("MoE" in type(sibling).__name__ for sibling in siblings) and path.endswith(("gate", "router"))
    )


def _kind(module: nn.Module, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


class Sites:
    """The sites of a model, numbered: the number is what its tap in the model knows of it."""

    def __init__(self) -> None:
        self.all: list[Site] = []

    def add(self, path: str, port: Port, key: str | None = None) -> int:
        """A new site's number."""
        self.all.append(Site(path, port, key))
        return len(self.all) - 1


def put_taps(model: nn.Module, structure: Structure, later: Collection[str] = ()) -> Sites:
    """Wraps the modules of a model, once, before it first runs; the inputs of those `later` have their sites alone."""
    modules, sites = named(model), Sites()
    if structure.embedding is not None:
        tap_outputs(modules[structure.embedding], sites.add(structure.embedding, Port.OUTPUT))
    for block in structure.blocks:
        for path in _both_sides(block):
            tap_inputs(modules[path], sites.add(path, Port.INPUT))
            tap_outputs(modules[path], sites.add(path, Port.OUTPUT))
        for path in block.projections:
            number = sites.add(path, Port.INPUT)
            if path not in later:
                tap_inputs(modules[path], number)
            if path in block.sublayers:
                tap_outputs(modules[path], sites.add(path, Port.OUTPUT))
        for path in block.makers:
            tap_outputs(modules[path], sites.add(path, Port.OUTPUT))
        for path in block.routers:
            tap_outputs(modules[path], sites.add(path, Port.OUTPUT))
    for path in structure.final_norms:
        tap_outputs(modules[path], sites.add(path, Port.OUTPUT))
    return sites


def _both_sides(block: BlockStructure) -> Sequence[str]:
    within = [path for path in (block.attention, *block.norms, *block.sublayers) if path and path != block.path]
    taken = {*block.projections, *block.routers}
    return [*(path for path in within if path not in taken), block.path]
