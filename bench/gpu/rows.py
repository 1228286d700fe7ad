"""What is timed, as data: the rows of the table, what each must reach, and who has them. Imports nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PLAIN: Final = "plain vLLM"
OURS: Final = "jackfield"
ALONE: Final = "jackfield alone"  # without plain vLLM beside it, to see what it takes of the device


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work. `name` is also what runs it, in `ours` and in `peers`.

    `least`: by batch, the part of plain vLLM's speed that jackfield is to reach. `single`: batch 1 alone. `long`: with
    a scale's long prompts instead of its short ones.
    """

    name: str
    title: str
    least: Mapping[int, float] = field(default_factory=dict[int, float])
    single: bool = False
    long: bool = False

    def runs_at(self, batch: int) -> bool:
        return batch == 1 or not self.single


def _least(one: float, middle: float, large: float) -> dict[int, float]:
    return {1: one, 64: middle, 256: large}


ROWS: Final = (
    Row("idle", "installed, nothing traced", _least(0.995, 0.995, 0.99)),
    Row("block-one", "one request of the batch with a Python block at one layer", _least(0.97, 0.95, 0.88)),
    Row("steer-one-layer", "every request steered at one layer, each its own way", _least(0.99, 0.99, 0.98)),
    Row("steer-all-layers", "every request steered at all layers", _least(0.98, 0.98, 0.97)),
    Row("probe", "8 directions read at every layer, every token", _least(0.96, 0.95, 0.92)),
    Row("capture", "one layer's stream to the host, every token, as data", _least(0.97, 0.95, 0.90)),
    Row("block-each", "a Python block per request that edits one layer on every step", _least(0.96, 0.75, 0.65)),
    Row("block-all-layers", "a Python block that edits every layer on every step", {1: 0.90}, single=True),
    Row("pattern", "one layer's pattern on every decode step, short context", {1: 0.93}, single=True),
    Row("pattern-long", "one layer's pattern on every decode step, long context", {1: 0.90}, single=True, long=True),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's way. `package` is its folder among the peers' environments; None: vLLM itself, with an option."""

    name: str
    package: str | None
    rows: tuple[str, ...]


PEERS: Final = (
    Peer("vLLM eager", None, ("idle",)),
    Peer("nnsight", "nnsight", ("block-each", "capture")),
    Peer("nnsight taps", "nnsight", ("block-each", "capture")),
    Peer("vllm-lens", "vllm-lens", ("idle", "steer-one-layer", "capture")),
    Peer("hotwire", "hotwire-vllm", ("idle", "steer-one-layer")),
)

LOADS: Final = {
    PLAIN: PLAIN,
    "idle": "jackfield, nothing traced",
    "one-in-eight": "jackfield, one request in eight with a Python block",
    "steered": "jackfield, every request steered by data",
}
ONE_IN: Final = 8
"""How many requests there are to one with a block, in the mixed load."""
MEMORY_GIB: Final = 1.0
"""What jackfield may take of the device beside vLLM."""
