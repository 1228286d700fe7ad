"""Ctrl-C while blocks, gates and taps are put up or taken down: wherever it comes, the model is as it was."""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import _len_torch_function_stack  # pyright: ignore[reportPrivateUsage]
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import jackfield as jf
from tests import zoo

PACKAGE = str(Path(jf.__file__).parent)  # the clone may be called jackfield too, with torch in its environment
PROMPT = [5, 9, 17, 33]
PUTTING_UP = (
    "begin",
    "start",
    "connect",
    "_wrap",
    "put_up",
    "_put_up",
    "_gate",
    "_listen",
    "_open",
    "arrive",
    "__exit__",
)
TAKING_DOWN = ("_close", "close", "disconnect", "_unwrap", "kill", "depart", "__enter__", "_put_away")
HANDLING = frozenset((*PUTTING_UP, *TAKING_DOWN))


def everything(model: Any, t: Any) -> None:
    for _ in t.iter[:2]:
        _ = model.layers[1].attention_probabilities, model.layers[2].layer_output


class Ticks:
    """Counts the lines run in functions that put up and take down; raises at one of them, as Ctrl-C would.

    Not where a `with` ends: Python goes back to its line before it calls `__exit__`, and handles no signal in between.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0
        self._last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        ours = frame.f_code.co_name in HANDLING and frame.f_code.co_filename.startswith(PACKAGE)
        if ours and event in ("call", "line") and not self._ends_a_with(frame):
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self if ours else None

    def _ends_a_with(self, frame: FrameType) -> bool:
        before, self._last[frame] = self._last.get(frame, 0), frame.f_lineno
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return frame.f_lineno < before and line.lstrip().startswith("with ")


@contextmanager
def ticking(ticks: Ticks) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(ticks)
    try:
        yield
    finally:
        sys.settrace(before)


def left_behind(model: torch.nn.Module) -> list[str]:
    """What a run has left in the model, in transformers' table and in this thread."""
    found = [name for name, module in model.named_modules() if "forward" in vars(module)]
    found += [name for name in vars(ALL_ATTENTION_FUNCTIONS) if name != "_local_mapping"]
    found += ["a function mode"] if _len_torch_function_stack() else []
    return found + ([] if torch.is_grad_enabled() else ["gradients off"])


@pytest.fixture(scope="module")
def served() -> tuple[Any, jf.Model]:
    loaded = zoo.build("llama", fresh=True)
    return loaded, jf.Model(loaded)


def number_of_lines(model: jf.Model) -> int:
    ticks = Ticks()
    with ticking(ticks):
        model.run(PROMPT, everything, max_tokens=2)
    return ticks.count


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_nothing(served: tuple[Any, jf.Model]) -> None:
    loaded, model = served
    untouched = model.run(PROMPT, max_tokens=2).token_ids
    lines = number_of_lines(model)
    assert lines > 100
    for at in range(1, lines + 1, 7):
        with ticking(Ticks(at)), pytest.raises(KeyboardInterrupt):
            model.run(PROMPT, everything, max_tokens=2)
        assert left_behind(loaded) == [], f"after an interrupt at line {at} of {lines}"
    assert model.run(PROMPT, everything, max_tokens=2).token_ids == untouched
