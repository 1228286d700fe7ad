"""What becomes of a run in which one library's process dies."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.environments import Environment
from bench.turns import OURS, Process, answered


class Dying(Process):
    """A process that ends over what it is asked."""

    def __init__(self, library: str) -> None:
        super().__init__(Environment(library, Path(sys.executable)), Path(), 1)
        self.asked = 0

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.asked += 1
        self._process.kill()
        self._process.wait()
        raise RuntimeError("it ended")


def test_a_peer_that_dies_leaves_its_place_empty(capsys: pytest.CaptureFixture[str]) -> None:
    peer = Dying("nnsight")
    assert answered(peer, "time", job="prompt") == {}
    assert "without nnsight from here on: it ended" in capsys.readouterr().err
    assert answered(peer, "time", job="overhead") == {}
    assert peer.asked == 1
    peer.close()


def test_our_own_may_not_die() -> None:
    ours = Dying(OURS)
    with pytest.raises(RuntimeError, match="it ended"):
        answered(ours, "time", job="prompt")
    ours.close()
