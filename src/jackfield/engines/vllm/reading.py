"""What each tap's tensor means, decided by numbers on one probe prompt: which tensors add up to which stream.

vLLM's blocks take and return the stream itself, or two halves of it, and both may look alike: a block can return the
whole stream and something else beside it. Sublayers may be normed, scaled or folded into one another. Sums tell:
what was added between a block's input and its middle is what the attention adds, whatever it is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import torch
from torch import Tensor

from jackfield.engines.vllm.seen import Seen, Tolerance
from jackfield.engines.vllm.structure import BlockStructure, Structure
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Missing

NOTHING_ADDS_UP = "no tensors of this layer were found that add up to its stream"
FUSED = "the down projections of this layer are fused into one kernel, which keeps the neurons"
NO_NORM = Missing("no norm of this layer feeds it")
STREAM = ("layer_input", "attention_output", "layer_mid", "mlp_output", "layer_output")
SEVERAL_STREAMS = Missing("what passes from layer to layer is not one stream")


@dataclass(frozen=True, slots=True)
class Stream:
    """A value: `factor` times what passes at a site, or times the sum of the two halves that pass there."""

    site: Site
    summed: bool = False
    factor: float = 1.0


Reading = Stream | Missing


@dataclass(frozen=True, slots=True)
class LayerReading:
    """The values of one block, and the paths of its sublayers."""

    values: Mapping[str, Reading]
    attention: str | None
    mlp: str | None
    output_projection: str | None


def halves(
    structure: Structure, seen: Sequence[Seen], renorm: Callable[[str, Tensor], Tensor], near: Tolerance
) -> bool:
    """Whether blocks pass their stream in two halves.

    A norm that was called with two tensors tells, by what it gave: the norm of their sum, or of the first alone.
    """
    of = {each.site: each for each in seen}
    paths = [path for block in structure.blocks for path in block.norms]
    for path in (*paths, *structure.final_norms):
        given, made = of.get(Site(path, Port.INPUT)), of.get(Site(path, Port.OUTPUT))
        if given is None or made is None or given.residual is None or not given.residual.any():
            continue
        if near.same(renorm(path, given.x + given.residual), made.x):
            return True
        if near.same(renorm(path, given.x), made.x):
            return False
    return False


def read_layer(block: BlockStructure, seen: Sequence[Seen], near: Tolerance, *, summed: bool) -> LayerReading:
    """The values of one block, out of what the probe saw pass."""
    return _Layer(block, _within(block.path, seen), near, summed=summed).read()


def _within(path: str, seen: Sequence[Seen]) -> list[Seen]:
    sites = [each.site for each in seen]
    first, last = sites.index(Site(path, Port.INPUT)), sites.index(Site(path, Port.OUTPUT))
    return list(seen[first : last + 1])


least_squares = cast("Callable[..., tuple[Tensor, ...]]", torch.linalg.lstsq)  # untyped in torch


class _Layer:
    def __init__(self, block: BlockStructure, seen: list[Seen], near: Tolerance, *, summed: bool) -> None:
        self.block, self.seen, self.near, self.summed = block, seen, near, summed
        self.mixer = block.attention or next((x.site.path for x in seen if x.site.path in block.sublayers), None)
        self.heads = next((each for each in seen if each.site.port is Port.HEADS), None)
        self.attended = next((i for i, each in enumerate(seen) if self._is_mixing(each)), None)
        self.entering, self.leaving = (seen[i].stream(summed=summed) for i in (0, -1))
        self.usual = _usual(self.entering) & _usual(self.leaving)

    def _is_mixing(self, each: Seen) -> bool:
        return each is self.heads if self.heads is not None else each.site.path == self.mixer

    def read(self) -> LayerReading:
        sums = self._sums()
        mlp = self._mlp(sums)
        values: dict[str, Reading] = {
            "layer_input": Stream(self.seen[0].site, self.summed),
            "layer_output": Stream(self.seen[-1].site, self.summed),
            **sums,
            "attention_norm_output": self._norm_before(self.mixer) or NO_NORM,
            "mlp_norm_output": self._mlp_norm(mlp),
            "mlp_activations": self._activations(mlp),
            "router_logits": self._router(),
        }
        if not self.entering.numel():
            values |= dict.fromkeys(STREAM, SEVERAL_STREAMS)
        return LayerReading(values, self.mixer, mlp, self._output_projection())

    # -- what adds up to what

    def _sums(self) -> dict[str, Reading]:
        if self.attended is None:
            nothing: dict[str, Reading] = dict.fromkeys(
                ("attention_output", "layer_mid", "mlp_output"), Missing("this layer has no attention")
            )
            return nothing
        return (
            self._one_after_the_other(self.attended)
            or self._side_by_side(self.attended)
            or dict.fromkeys(("attention_output", "layer_mid", "mlp_output"), Missing(NOTHING_ADDS_UP))
        )

    def _one_after_the_other(self, attended: int) -> dict[str, Reading] | None:
        for index in range(attended + 1, len(self.seen) - 1):
            here = self.seen[index]
            if here.site.port is not Port.INPUT or here.x.shape != self.seen[0].x.shape:
                continue
            middle = here.stream(summed=self.summed)
            attention = self._part(middle - self.entering, attended, index)
            mlp = None if attention is None else self._part(self.leaving - middle, index, len(self.seen) - 1)
            if attention is not None and mlp is not None:
                mid = Stream(here.site, self.summed and here.residual is not None)
                return {"attention_output": attention, "layer_mid": mid, "mlp_output": mlp}
        return None

    def _part(self, added: Tensor, after: int, until: int) -> Stream | None:
        """The tensor that, but for a factor, is what was added: the last of those from `after` on, up to `until`."""
        for each in reversed(list(self._addends(after, until))):
            part, whole = each.x[self.usual], added[self.usual]
            factor = float((whole * part).sum() / part.square().sum())
            if self.near.same(part * factor, whole, self.leaving[self.usual]) and factor:
                return Stream(each.site, factor=_rounded(factor))
        return None

    def _addends(self, after: int, until: int) -> Iterator[Seen]:
        """The half that a block or a norm was handed beside the stream so far, then outputs of modules."""
        fitting = [
            each
            for each in self.seen[after + 1 : until + 1]
            if each.x.shape == self.entering.shape and bool(each.x.any())
        ]
        yield from (each for each in fitting if self.summed and each.residual is not None)
        yield from (each for each in fitting if each.site.port is Port.OUTPUT and each.site.path != self.block.path)

    def _side_by_side(self, attended: int) -> dict[str, Reading] | None:
        added = (self.leaving - self.entering)[self.usual]
        owner = self.mixer
        parts = list(self._addends(0, len(self.seen) - 1))
        ours = [each for each in parts if each.site.path == owner]
        others = [each for each in parts if each.site.path in self.block.sublayers]
        for attention, mlp in product(ours, others):
            both = torch.stack([attention.x[self.usual], mlp.x[self.usual]], 1)
            factors = least_squares(both, added[:, None])[0][:, 0]
            if self.near.same(both @ factors, added, self.leaving[self.usual]):
                first, second = (_rounded(float(factor)) for factor in factors)
                return {
                    "attention_output": Stream(attention.site, factor=first),
                    "layer_mid": Missing("attention and MLP stand side by side in this layer"),
                    "mlp_output": Stream(mlp.site, factor=second),
                }
        return None

    # -- what feeds what

    def _mlp(self, sums: Mapping[str, Reading]) -> str | None:
        """The sublayer whose output is added; or the first behind the attention that has a projection back."""
        added = sums["mlp_output"]
        if isinstance(added, Stream) and added.site.path in self.block.sublayers:
            return added.site.path
        inside = [path for path in self.block.projections if not _is_under(path, self.mixer)]
        behind = [path for path in self.block.sublayers if self._is_behind(path)]
        return next((owner for owner in behind for path in inside if _is_under(path, owner)), None)

    def _is_behind(self, path: str) -> bool:
        """Whether a sublayer is called, and after the attention: Gemma 3n's AltUp is not, its LAuReL comes before."""
        called = next((i for i, each in enumerate(self.seen) if each.site == Site(path, Port.INPUT)), None)
        return called is not None and (self.attended is None or called > self.attended)

    def _norm_before(self, path: str | None) -> Stream | None:
        given = None if path is None else self._at(Site(path, Port.INPUT))
        norms = [each for each in self.seen if each.site.path in self.block.norms and each.site.port is Port.OUTPUT]
        fits = (each for each in reversed(norms) if given is not None and torch.equal(each.x, given.x))
        return next((Stream(each.site) for each in fits), None)

    def _mlp_norm(self, mlp: str | None) -> Reading:
        """What enters the MLP, where that is what a norm gave.

        Not the norm's own output, which in layers whose sublayers stand side by side passes before the attention.
        """
        for path in (mlp, *self.block.sublayers):
            if path is not None and path != self.mixer and self._norm_before(path) is not None:
                return Stream(Site(path, Port.INPUT))
        return NO_NORM

    def _activations(self, mlp: str | None) -> Reading:
        if self.block.routers:  # a shared expert's are not all
            return Missing(FUSED)
        inside = [path for path in self.block.projections if not _is_under(path, self.mixer)]
        owned = [path for path in inside if mlp is None or _is_under(path, mlp)] or inside
        seen = [path for path in owned if self._at(Site(path, Port.INPUT)) is not None]
        if not seen:
            return Missing(FUSED)
        return Stream(Site(seen[-1], Port.INPUT))

    def _router(self) -> Reading:
        return (
            Stream(Site(self.block.routers[0], Port.OUTPUT))
            if self.block.routers
            else Missing("this layer has no router")
        )

    def _output_projection(self) -> str | None:
        if self.heads is None:
            return None
        heads = self.heads.x
        inside = [path for path in self.block.projections if _is_under(path, self.mixer)]
        fitting = [path for path in inside if (at := self._at(Site(path, Port.INPUT))) and at.x.shape == heads.shape]
        return fitting[-1] if fitting else None

    def _at(self, site: Site) -> Seen | None:
        return next((each for each in self.seen if each.site == site), None)


def _usual(stream: Tensor) -> Tensor:
    """Where a stream is not hundreds of times larger than elsewhere: what was added there is lost in rounding."""
    size = stream.abs()
    return size <= 100 * size.median() if size.numel() else size.bool()


def _is_under(path: str, owner: str | None) -> bool:
    return owner is not None and (path == owner or path.startswith(f"{owner}."))


def _rounded(factor: float) -> float:
    return 1.0 if abs(factor - 1.0) < 1e-3 else factor
