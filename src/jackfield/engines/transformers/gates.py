"""What one model keeps from run to run: a gate for each module that blocks have looked at, and where each name passes.

Between runs no gate is up. In a run they are put up where a block in flight can want them, and above that: whoever
stands at a module stands inside of all that hold it, and may go on to wait for their ends, which a gate put up while
its module runs would not see.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from jackfield.engines.transformers.gate import Gate
from jackfield.errors import UnsupportedModel
from jackfield.interleave.channel import Slots
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, Formula, LayerAnatomy

AFTER_THE_OP = frozenset({"attention_premix", "attention_head_results"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where the values of one name pass: the modules to be gated, those around them first, and sites inside a call."""

    paths: tuple[str, ...]
    inside: tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class _Standing:
    """The gates of a place, and where in the tree their modules stood when they were made."""

    gates: tuple[Gate, ...]
    links: tuple[tuple[dict[str, nn.Module], str, nn.Module], ...]

    @property
    def as_before(self) -> bool:
        """Whether they stand there still."""
        for held_by, name, module in self.links:  # noqa: SIM110 - all() takes twice the time
            if held_by.get(name) is not module:
                return False
        return True


class Gates:
    """The gates of one model, the table of its slots, and how many forward passes they have seen."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy) -> None:
        self.model, self.anatomy = model, anatomy
        self.slots = Slots()
        self.clock = 0
        self._made: dict[str, Gate] = {}
        self._standing: dict[str, _Standing] = {}
        self._names: dict[str, tuple[str, str]] = {}
        self._holders: dict[str, dict[str, nn.Module]] = {}
        self._above: dict[str, tuple[str, ...]] = {}

    def gate(self, path: str) -> Gate:
        """The gate of the module that stands at `path` now."""
        module, made = self._module(path), self._made.get(path)
        if made is None or made.module is not module:
            made = self._made[path] = Gate(module, path, self.slots)
        return made

    def gates_of(self, name: str) -> tuple[Gate, ...]:
        """The gates of the modules where a value passes, those around them first."""
        standing = self._standing.get(name)
        if standing is None or not standing.as_before:
            standing = self._standing[name] = self._stand(self.places[name].paths)
        return standing.gates

    def _stand(self, paths: Sequence[str]) -> _Standing:
        names = [path.split(".") for path in paths if path]
        trees = dict.fromkeys(".".join(each[:end]) for each in names for end in range(1, len(each) + 1))
        links = tuple((self._holder(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in trees)
        return _Standing(tuple(map(self.gate, paths)), tuple((holder, name, holder[name]) for holder, name in links))

    def above(self, path: str) -> tuple[str, ...]:
        """The paths of the modules that hold this one, without those that are never called, such as a ModuleList."""
        if path not in self._above:
            names = path.split(".")
            paths = [".".join(names[:end]) for end in range(1, len(names))]
            self._above[path] = tuple(each for each in paths if _is_called(self._module(each)))
        return self._above[path]

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """Where values pass outside of the attention op, by their names."""
        found: dict[str, list[Site]] = {}
        for name, site in self._named_sites():
            found.setdefault(name, []).append(site)
        return {name: self._place(sites) for name, sites in found.items()}

    @cached_property
    def containers(self) -> tuple[str, ...]:
        """What has to be gated ahead of time: nothing, where the model calls each module inside of those that hold it.

        Where a module stands in two places, or a layer uses what stands outside of it, every block and sublayer.
        """
        layers = self.anatomy.layers
        if not self._shares_modules and all(_keeps_to_itself(layer) for layer in layers):
            return ()
        paths = (path for layer in layers for path in (layer.path, layer.attention_path, layer.mlp_path))
        return tuple(dict.fromkeys(path for path in paths if path))

    @property
    def _shares_modules(self) -> bool:
        def count(*, once: bool) -> int:
            return len(list(cast("Iterable[object]", self.model.named_modules(remove_duplicate=once))))

        return count(once=True) != count(once=False)

    def _named_sites(self) -> Iterator[tuple[str, Site]]:
        for values in (self.anatomy.values, *(layer.values for layer in self.anatomy.layers)):
            yield from ((name, formula.site) for name, formula in values.items() if isinstance(formula, Formula))
        for layer in self.anatomy.layers:
            projection = getattr(layer.attention, "output_projection", None)  # a Missing has none
            if projection is not None:
                yield from ((name, Site(projection, Port.INPUT)) for name in AFTER_THE_OP)

    def _place(self, sites: Sequence[Site]) -> Place:
        whole = [site.path for site in sites if site.port in (Port.INPUT, Port.OUTPUT)]
        paths = dict.fromkeys(each for path in whole for each in (*self.above(path), path))
        return Place(tuple(paths), tuple(site for site in sites if site.port not in (Port.INPUT, Port.OUTPUT)))

    def renew(self) -> None:
        """A run begins: modules may have been replaced since the last."""
        self._holders.clear()

    def _module(self, path: str) -> nn.Module:
        """`get_submodule`, for what stands below one module looked up once a run. UnsupportedModel: not there now."""
        if not path:
            return self.model
        names = self._names.get(path)
        if names is None:
            above, _, name = path.rpartition(".")
            names = self._names[path] = above, name
        try:
            return self._holder(names[0])[names[1]]
        except KeyError:
            raise UnsupportedModel(
                f"The model had a module {path} when it was loaded, and has none now: its structure was changed since. "
                "Load it again: jackfield.Model(model)."
            ) from None

    def _holder(self, path: str) -> dict[str, nn.Module]:
        """The modules below the one at `path`."""
        holder = self._holders.get(path)
        if holder is None:
            holder = self._holders[path] = self._module(path).__dict__["_modules"]
        return holder


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _keeps_to_itself(layer: LayerAnatomy) -> bool:
    paths: list[str | None] = [layer.attention_path, layer.mlp_path]
    paths += [formula.site.path for formula in layer.values.values() if isinstance(formula, Formula)]
    if isinstance(layer.attention, AttentionAnatomy):
        paths += [layer.attention.path, layer.attention.output_projection]
    return all(path is None or f"{path}.".startswith(f"{layer.path}.") for path in paths)
