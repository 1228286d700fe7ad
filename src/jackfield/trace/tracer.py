"""`t` inside a block: its steps, its saves, its stop."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from jackfield.errors import InvalidRequest, TracingError, UnboundSave, UnknownValue, near
from jackfield.interleave.worker import Worker
from jackfield.trace.binding import keep
from jackfield.trace.gradient import gradient


class Tracer:
    """One request as its block sees it."""

    def __init__(
        self,
        worker: Worker,
        device: torch.device,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        *,
        gradients: bool = False,
    ) -> None:
        self._worker, self._device, self._gradients = worker, device, gradients
        self.prompt = prompt
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.saved: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Never:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("result", "results"):
            raise TracingError(f"There is no t.{name} inside a block: it is there when the block has ended.")
        known = [item for item in (*dir(type(self)), *vars(self)) if not item.startswith("_")]
        raise UnknownValue(f"Inside a block, t has no {name!r}; it has {', '.join(sorted(known))}.{near(name, known)}")

    @property
    def iter(self) -> "Steps":
        """The steps of this request: `for step in t.iter[:4]`, `t.iter[2]`, `t.iter[[1, 3]]`, `t.iter[:]`."""
        return Steps(self._worker)

    @property
    def step(self) -> int:
        """The step whose values the block reads: 0 is the whole prompt, n the n-th generated token going back in."""
        return self._worker.step

    @property
    def positions(self) -> Tensor:
        """The absolute positions of this step's rows [t], int64, on the model's device."""
        positions = self._worker.rows.positions(self._worker.step)
        return torch.arange(positions.start, positions.stop, device=self._device)

    def save(self, **named: Any) -> None:
        """Keeps objects under names: `t.save(pattern=x)` puts x, as it is when the block ends, into `Result.saved`."""
        if not named:
            raise UnboundSave("t.save() needs a name for what it keeps: t.save(pattern=x).")
        self.saved.update(named)

    def gradient(self, loss: Tensor, values: Any) -> Any:
        """D `loss` / d each of `values`, which are reads: a tensor for one, a list for several. May be asked again.

        In a trace with `gradients=True`. TracingError for a loss that is not one number of the graph, and for a value
        that it does not depend on.

        >>> def block(model, t):                                        # doctest: +SKIP
        ...     stream = model.layers[3].layer_output
        ...     return t.gradient(model.logits[0, 0, 42], stream)       # [1, t, d_model]
        """
        if not self._gradients:
            raise TracingError(
                "This trace keeps no graph: write model.trace(prompt, gradients=True), or model.run(..., "
                "gradients=True)."
            )
        return gradient(loss, values)

    def stop(self) -> None:
        """Ends the request after this step; no token is forced, and `finish_reason` is "stopped"."""
        self._worker.stop()

    def finalize(self) -> None:
        """Moves what was saved to the CPU, in its own dtype, without gradients."""
        self.saved = keep(self.saved)


class Steps:
    """Which steps a loop runs over."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __getitem__(self, steps: int | slice | Sequence[int]) -> Iterator[int]:
        return self._run(_ascending(steps))

    def __iter__(self) -> Iterator[int]:
        return self[:]

    def _run(self, steps: Iterator[int]) -> Iterator[int]:
        worker = self._worker
        around = worker.step  # that of the loop in which this one stands; 0 outside of loops
        try:
            for step in steps:
                if not worker.reach_step(step):
                    return
                yield step
        finally:
            worker.step = around


def _ascending(steps: int | slice | Sequence[int]) -> Iterator[int]:
    if isinstance(steps, slice):
        return iter(_range(steps))
    try:
        numbers: list[Any] = [steps] if isinstance(steps, int) else list(steps)  # parsed here
    except TypeError:
        numbers = [steps]
    if not all(_counts(number) for number in numbers):
        raise InvalidRequest(f"t.iter[{steps!r}]: a step is an int from 0 upwards.")
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        raise InvalidRequest(f"t.iter[{steps!r}]: steps come in order, each once.")
    return iter(numbers)


def _range(steps: slice) -> range:
    start, stop, stride = steps.start, steps.stop, steps.step
    if not all(number is None or _counts(number) for number in (start, stop, stride)) or stride == 0:
        raise InvalidRequest(
            f"t.iter[{start}:{stop}:{stride}]: steps are ints from 0 upwards; how many there will be is not known."
        )
    return range(start or 0, stop if stop is not None else 2**31, stride or 1)


def _counts(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
