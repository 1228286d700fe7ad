"""CUDA graphs with blocks in them: where a block waits, a graph is cut, and the block runs between its two parts.

Full graphs, and the pieces between attention ops that passes with prompts take, whose ops run as they come.

A set of graphs is kept per armed set, the sites that the requests of a step want; the set that arms nothing is vLLM's
own. Interventions that are data need no cut: the kernel that reads their tables is in the graph. What a tap does is
decided while a graph is captured: at a site that is cut the capture ends, and begins again behind a
callback. A replay is a list of graphs and callbacks, and a callback is what the tap does in any other pass.

Which sites a block will want is what it has wanted so far. Where it wants another, the pass is run again without
graphs, with the same edits, and the site is armed from then on: right first, fast from the second time.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from jackfield.engines.vllm.foreign import foreign
from jackfield.engines.vllm.taps import NOW
from jackfield.interleave.site import Port, Site

if TYPE_CHECKING:
    from jackfield.engines.vllm.op_tap import OpTap


@dataclass(frozen=True, slots=True)
class Armed:
    """What graphs have in them: sites at which they are cut for blocks, and sites that look into the tables.

    `version` is that of the tables' columns, which stand in the graphs.
    """

    cut: frozenset[Site] = frozenset()
    tables: frozenset[Site] = frozenset()
    version: int = 0

    def __bool__(self) -> bool:
        return bool(self.cut or self.tables)

    def serves(self, other: "Armed") -> bool:
        """Whether steps that want `other` run as well with these: a site that looks in vain costs next to nothing."""
        return self.cut == other.cut and self.version == other.version and self.tables >= other.tables


NOTHING: Final = Armed()
MOST_SETS: Final = 16
"""How many armed sets keep their graphs; the one unused for longest goes first."""
MOST_WANTED: Final = 1024
"""How many sets and sizes are remembered that were wanted in pieces, once."""


def armed_site(site: Site) -> Site:
    """What is armed for a site: the four ports of an attention op are one wrapper."""
    is_op = site.port in (Port.ATTEND, Port.SCORES, Port.PATTERN, Port.HEADS)
    return Site(site.path, Port.ATTEND) if is_op else site


TableLaunch = Callable[[int, Tensor, Tensor | None], None]
"""What a tap of this number does that looks into the tables."""


class SegmentedGraph:
    """Takes the place of `torch.cuda.CUDAGraph` while a runner captures: a list of graphs and callbacks."""

    def __init__(self, graph: Callable[[], Any]) -> None:
        self._graph = graph
        self._parts: list[Callable[[], None]] = []
        self._begun: Any = None
        self.is_open = False  # whether it is being captured
        self._arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; what is given, the memory pool among it, holds for every part."""
        self._arguments, self.is_open = (args, kwargs), True
        self._begin()

    def capture_end(self) -> None:
        """As torch's."""
        self.is_open = False
        self._end()

    def cut(self, callback: Callable[[], None]) -> None:
        """Ends a part here and begins the next behind `callback`."""
        self._end()
        self._parts.append(callback)
        self._begin()

    def replay(self) -> None:
        """Every part in order."""
        for part in self._parts:
            part()

    def _begin(self) -> None:
        args, kwargs = self._arguments
        self._begun = self._graph()
        self._begun.capture_begin(*args, **kwargs)

    def _end(self) -> None:
        self._begun.capture_end()
        self._parts.append(self._begun.replay)


class Capture:
    """What taps tell while a graph is captured: armed sites cut it."""

    def __init__(self, armed: Armed, numbered: Mapping[int, Site], launch: TableLaunch) -> None:
        self._armed, self._numbered, self._launch = armed, numbered, launch
        self._graph: SegmentedGraph | None = None
        self._made: Callable[[], Any] = torch.cuda.CUDAGraph

    def graph(self, *_: Any, **__: Any) -> SegmentedGraph:
        """A graph to capture into: the one that is cut from now on."""
        self._graph = SegmentedGraph(self._made)
        return self._graph

    def tap(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        """A tap of a module, by its number."""
        if self._numbered[site] in self._armed.tables:
            self._launch(site, x, residual)  # in the run before a capture as well, in which it is compiled
        if self._graph is not None and self._graph.is_open and self._numbered[site] in self._armed.cut:
            held = _weak(x), _weak(residual)
            self._graph.cut(lambda: _now().at_cut(site, *held))

    def before(self, tap: "OpTap", q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> None:
        """An attention op is about to run."""
        self._cut_at(tap, tap.before, (q, k, v, cache))

    def behind(self, tap: "OpTap", q: Tensor, k: Tensor, v: Tensor, cache: Tensor, output: Tensor) -> None:
        """An attention op has run."""
        self._cut_at(tap, tap.behind, (q, k, v, cache, output))

    def _cut_at(self, tap: "OpTap", told: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
        is_captured = self._graph is not None and self._graph.is_open  # in pieces an op runs between two of them
        if self._graph is not None and is_captured and Site(tap.path, Port.ATTEND) in self._armed.cut:
            held = [_weak(tensor) for tensor in tensors]
            self._graph.cut(lambda: told(_now(), *held))


def _now() -> Any:
    now = NOW.get()
    assert now is not None, "an armed graph was replayed outside a watched pass"
    return now


def _weak(tensor: Tensor | None) -> Any:
    """The same memory, not kept: a graph's pool would never be free again."""
    if tensor is None:
        return None
    return foreign("vllm.utils.torch_utils", "weak_ref_tensor")(tensor)


@dataclass(slots=True)
class Stats:
    """How passes ran since the engine was started, for measurements."""

    plain: int = 0  # without a traced request, as vLLM runs them
    armed: int = 0  # graphs with blocks or tables in them
    again: int = 0  # of these, run a second time for a site that had not been armed
    eager: int = 0  # with traced requests, without graphs
    tabled: int = 0  # of the armed ones, those with tables in them
    captured: int = 0  # graphs captured for armed sets

    def count(self, *, traced: bool) -> None:
        """Counts a pass that takes what vLLM chose."""
        if traced:
            self.eager += 1
        else:
            self.plain += 1


class _Set:
    """The graphs of one armed set: full ones by descriptor, and of each piece those that it keeps itself."""

    def __init__(self) -> None:
        self.full: dict[Any, Any] = {}
        self.of_piece: dict[Any, dict[Any, Any]] = {}
        self.known: set[Any] = set()  # the descriptors of both


class Graphs:
    """The graphs of vLLM's second runner, by armed set. `pieces` are what keeps the graphs between attention ops."""

    def __init__(self, manager: Any, sites: Mapping[int, Site], stats: Stats, pieces: Callable[[], list[Any]]) -> None:
        self._manager, self._sites, self._stats, self._find_pieces = manager, sites, stats, pieces
        self._pieces: Sequence[Any] = ()  # none before vLLM has compiled them
        self.launch: TableLaunch | None = None  # set where there are tables
        self._sets: OrderedDict[Armed, _Set] = OrderedDict()
        self._distrusted = False
        self._wanted_once: dict[tuple[Any, Armed], None] = {}
        self._arguments: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._capture: Callable[..., Any] = manager.capture
        manager.capture = self._remembered

    def _remembered(self, *args: Any, **kwargs: Any) -> Any:
        """Vllm's own capture, at start-up: what it is called with serves for ours."""
        self._arguments = args, kwargs
        captured = self._capture(*args, **kwargs)
        self._pieces = self._find_pieces()
        return captured

    @property
    def ready(self) -> bool:
        """Whether there are full graphs at all."""
        return self._arguments is not None

    def takes_pieces(self, descriptor: Any, armed: Armed) -> bool:
        """Whether a pass in pieces has graphs: those of a set are made when a size of it is wanted a second time."""
        if self._distrusted or not self._pieces:
            return False
        if not armed or self._serving(descriptor, armed):
            return True
        wanted = descriptor, armed
        if wanted in self._wanted_once:
            return True
        self._wanted_once[wanted] = None
        if len(self._wanted_once) > MOST_WANTED:
            del self._wanted_once[next(iter(self._wanted_once))]
        return False

    def distrust_pieces(self) -> None:
        """A pass through pieces was not what it is without graphs: none is armed from now on."""
        self._distrusted = True
        logging.getLogger(__name__).warning(
            "The CUDA graphs of a prompt did not compute what the model does without them. Prompts with blocks or "
            "interventions take no graphs from now on: they are slower, and right."
        )

    def _serving(self, descriptor: Any, armed: Armed) -> list[Armed]:
        return [each for each, of_set in self._sets.items() if descriptor in of_set.known and each.serves(armed)]

    def arm(self, armed: Armed) -> None:
        """Captures what a pass of any size that vLLM has a graph for will want."""
        for descriptor in list(self._manager.graphs):
            self.ensure(descriptor, armed)

    def ensure(self, descriptor: Any, armed: Armed) -> Armed:
        """The smallest set that serves and has a graph of this descriptor; captures that of `armed` if none does."""
        armed = min(self._serving(descriptor, armed), key=lambda each: len(each.tables), default=armed)
        of_set = self._sets.setdefault(armed, _Set())
        self._sets.move_to_end(armed)
        if descriptor not in of_set.known:
            self._stats.captured += 1
            with self._only(descriptor, of_set), _capturing(Capture(armed, self._sites, self._launched)):
                assert self._arguments is not None
                self._capture(*self._arguments[0], **{**self._arguments[1], "progress_bar_desc": "Arming"})
            of_set.known.add(descriptor)
        stale = [each for each in self._sets if each.tables and each.version != armed.version and armed.tables]
        for each in stale:
            del self._sets[each]
        while len(self._sets) > MOST_SETS:
            self._sets.popitem(last=False)
        return armed

    def _launched(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        assert self.launch is not None, "a graph with tables, and no tables"
        self.launch(site, x, residual)

    @contextmanager
    def taking(self, armed: Armed) -> Generator[None]:
        """While it is open, the runner replays the graphs of this armed set."""
        with self._in_place(self._sets[armed]):
            yield

    @contextmanager
    def _in_place(self, of_set: _Set) -> Generator[None]:
        pieces = self._pieces
        held, of_pieces = self._manager.graphs, [piece.concrete_cudagraph_entries for piece in pieces]
        self._manager.graphs = of_set.full
        for piece in pieces:
            piece.concrete_cudagraph_entries = of_set.of_piece.setdefault(piece, {})
        try:
            yield
        finally:
            self._manager.graphs = held
            for piece, entries in zip(pieces, of_pieces, strict=True):
                piece.concrete_cudagraph_entries = entries

    @contextmanager
    def _only(self, descriptor: Any, of_set: _Set) -> Generator[None]:
        """While it is open, the runner captures this descriptor alone, into this set."""
        manager = self._manager
        held, manager._capture_descs = manager._capture_descs, {descriptor.cg_mode: [descriptor]}
        try:
            with self._in_place(of_set):
                yield
        finally:
            manager._capture_descs = held


@contextmanager
def _capturing(capture: Capture) -> Generator[None]:
    """While it is open, graphs are captured into segments, and taps tell `capture`."""
    held, token = torch.cuda.CUDAGraph, NOW.set(capture)
    torch.cuda.CUDAGraph = capture.graph
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = held
        NOW.reset(token)
