"""What a worker tells of its model: facts, the module tree as names, and where each value is or why it is not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from jackfield.engines.engine import Facts
from jackfield.errors import UnknownValue, near
from jackfield.values.anatomy import AttentionAnatomy, Missing


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """One block: its paths, its attention's plain facts, and a reason for each value that it lacks."""

    path: str
    attention_path: str | None
    mlp_path: str | None
    attention: AttentionAnatomy | Missing
    slopes: Tensor | None
    sinks: Tensor | None
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Description:
    """A whole model, without its weights: what a client knows of the workers' model."""

    facts: Facts
    layers: tuple[LayerDescription, ...]
    missing: Mapping[str, str]  # of the root's values
    modules: Mapping[str, str]  # the path and the class's name of every module
    limits: Mapping[str, int]  # the settings that bound a request: max_model_len, ...
    untraceable: str | None = None  # why no block can run beside the requests of this engine


class Outline(nn.Module):
    """A module of the workers' model, by name alone: it has its children, and nothing to compute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}, in vLLM's workers>"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """It has no weights here: UnknownValue."""
        raise UnknownValue(f"This {self.kind} is in vLLM's workers; call it inside a block.")


def outline(modules: Mapping[str, str]) -> nn.Module:
    """The tree of a model as outlines."""
    root = Outline(modules.get("", "Model"))
    made: dict[str, nn.Module] = {"": root}
    for path in sorted(modules, key=lambda path: path.count(".")):
        if path:
            owner, _, name = path.rpartition(".")
            made[path] = Outline(modules[path])
            made[owner].add_module(name, made[path])
    return root


def submodule(root: nn.Module, path: str, paths: Mapping[str, Any]) -> nn.Module:
    """The module at a path; UnknownValue with near names."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        raise UnknownValue(f"There is no module {path!r} in this model.{near(path, paths)}") from None
