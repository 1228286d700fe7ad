"""What a capture makes of taps, with graphs that only say what was done: real ones need a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from jackfield.engines.vllm import graphs
from jackfield.engines.vllm.graphs import Armed, Capture
from jackfield.engines.vllm.taps import NOW
from jackfield.interleave.site import Port, Site

SITES = {number: Site(f"layers.{number}", Port.OUTPUT) for number in range(3)}
X = torch.zeros(2, 4)


class Pass:
    """What a replay tells of."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def tap(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        self.told.append(("everything", site))

    def at_cut(self, site: int, x: Tensor, residual: Tensor | None) -> None:
        self.told.append(("blocks", site))


class Graph:
    """A part of a graph."""

    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


def captured(armed: Armed, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[tuple[str, int]]]:
    """Which taps launched while a graph over all sites was captured, and what its replay tells a pass."""
    launched: list[int] = []
    monkeypatch.setattr(graphs, "_weak", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    capture: Any = Capture(armed, SITES, lambda site, x, residual: launched.append(site))
    graph = capture.graph()
    graph.capture_begin()
    for site in SITES:
        capture.tap(site, X, None)
    graph.capture_end()
    seen = Pass()
    token = NOW.set(seen)  # type: ignore[arg-type]
    try:
        graph.replay()
    finally:
        NOW.reset(token)
    return launched, seen.told


def test_a_site_that_is_cut_and_in_the_tables_does_what_the_tables_say_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the graph, and not again where it is cut for a block."""
    armed = Armed(frozenset([SITES[0], SITES[1]]), frozenset([SITES[1], SITES[2]]))
    assert captured(armed, monkeypatch) == ([1, 2], [("blocks", 0), ("blocks", 1)])


def test_a_set_that_arms_nothing_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert captured(Armed(), monkeypatch) == ([], [])
    assert not Armed()


def test_more_tables_serve_and_other_cuts_or_columns_do_not() -> None:
    some, more = frozenset([SITES[0]]), frozenset([SITES[0], SITES[1]])
    assert Armed(some, more, 1).serves(Armed(some, some, 1))
    assert not Armed(some, some, 1).serves(Armed(some, more, 1))
    assert not Armed(more, some, 1).serves(Armed(some, some, 1))
    assert not Armed(some, some, 2).serves(Armed(some, some, 1))


class Manager:
    """vLLM's, of two batch sizes; each capture is what `graphs` and the sizes then are."""

    def __init__(self) -> None:
        self.graphs: dict[str, Any] = {}
        self._capture_descs: dict[str, list[Any]] = {"full": [size(1), size(2)]}
        self.captures: list[tuple[str, bool]] = []

    def capture(self, *_: Any, progress_bar_desc: str = "") -> None:
        for descriptor in self._capture_descs["full"]:
            self.captures.append((descriptor.name, isinstance(NOW.get(), Capture)))
            self.graphs[descriptor] = object()


class size:  # noqa: N801 - a descriptor of vLLM's
    """A batch size that has a graph."""

    cg_mode = "full"

    def __init__(self, rows: int) -> None:
        self.name = f"{rows} rows"


def test_what_is_armed_ahead_is_captured_once_for_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: sizes that are left to the first pass, and graphs that a step's own sites do not find."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    manager, stats = Manager(), graphs.Stats()
    kept = graphs.Graphs(manager, SITES, stats, list)
    kept.arm(Armed(frozenset([SITES[1]])))
    assert not manager.captures  # nothing is there before vLLM has captured its own
    manager.capture()
    own = dict(manager.graphs)
    kept.arm(Armed(frozenset([SITES[1]])))
    assert manager.captures[2:] == [("1 rows", True), ("2 rows", True)]
    assert manager.graphs == own
    for descriptor in own:
        assert kept.ensure(descriptor, Armed(frozenset([SITES[1]]))) == Armed(frozenset([SITES[1]]))
    assert stats.captured == 2
    kept.ensure(next(iter(own)), Armed(frozenset([SITES[2]])))
    assert stats.captured == 3


class Piece:
    """vLLM's wrapper of the compiled code between two attention ops, which keeps its graphs itself."""

    def __init__(self) -> None:
        self.concrete_cudagraph_entries: dict[str, str] = {"mine": "vLLM's own"}


class InPieces(Manager):
    """Captures into what the pieces keep."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self.pieces = pieces
        self._capture_descs = {"pieces": [size(1)]}

    def capture(self, *_: Any, progress_bar_desc: str = "") -> None:
        for descriptor in self._capture_descs["pieces"]:
            self.captures.append((descriptor.name, isinstance(NOW.get(), Capture)))
            for piece in self.pieces:
                piece.concrete_cudagraph_entries[descriptor.name] = f"capture {len(self.captures)}"


def test_pieces_have_graphs_of_each_set_from_the_second_time_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kills: graphs of one set in another's place, and a capture for what is wanted once."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    pieces = [Piece(), Piece()]
    manager, stats = InPieces(pieces), graphs.Stats()
    kept = graphs.Graphs(manager, SITES, stats, lambda: list(pieces))
    manager.capture()
    (small,) = manager._capture_descs["pieces"]
    small.cg_mode = "pieces"
    own = dict(pieces[0].concrete_cudagraph_entries)
    assert kept.takes_pieces(small, Armed())  # vLLM's own, with nothing in them
    first, second = (Armed(tables=frozenset([SITES[number]]), version=1) for number in (0, 1))
    assert [kept.takes_pieces(small, first) for _ in range(2)] == [False, True]
    for each in (first, second):
        assert kept.ensure(small, each) == each
    assert kept.takes_pieces(small, second)
    assert pieces[0].concrete_cudagraph_entries == own
    seen: list[Any] = []
    for each in (first, second):
        with kept.taking(each):
            seen.append(dict(pieces[1].concrete_cudagraph_entries))
    assert seen[0].keys() == seen[1].keys() == {"1 rows"}
    assert seen[0] != seen[1]
    assert pieces[1].concrete_cudagraph_entries == own
    assert stats.captured == 2
    assert not graphs.Graphs(manager, SITES, stats, list).takes_pieces(small, first)
    with caplog.at_level("WARNING"):
        kept.distrust_pieces()
    assert "slower, and right" in caplog.text
    assert not kept.takes_pieces(small, second)


class Op:
    """An attention op's tap."""

    path = "layers.0.attention"

    def before(self, now: Pass, *_: Any) -> None: ...


def test_an_op_between_two_pieces_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a cut in a graph that has ended."""
    monkeypatch.setattr(graphs, "_weak", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    armed = Armed(frozenset([SITES[0], Site(Op.path, Port.ATTEND)]))
    capture: Any = Capture(armed, SITES, lambda site, x, residual: None)
    graph = capture.graph()
    graph.capture_begin()
    graph.capture_end()
    capture.before(Op(), X, X, X, X)
    capture.tap(0, X, None)
    assert len(graph._parts) == 1
    graph = capture.graph()
    graph.capture_begin()
    capture.before(Op(), X, X, X, X)
    graph.capture_end()
    assert len(graph._parts) == 3
