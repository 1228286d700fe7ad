"""The one thread that runs a vLLM, for everybody who asks something of it.

Samples of all callers stand in one continuous batch: whoever waits, waits for a future. A caller's interrupt never
lands inside a step, and blocks that run in this process stay on one thread, as greenlets must.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from jackfield.engines.vllm.companion import Fate
from jackfield.errors import EngineDied, InvalidRequest

T = TypeVar("T")
CLOSED = "This model was closed; load it again with jackfield.Model(...)."


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a request, as vLLM is asked for it: `prompt` and `params` are its own."""

    name: str
    prompt: Any
    params: Any
    traced: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A sample that has ended: vLLM's output, and what became of its block."""

    output: Any
    fate: Fate | None


class Driver:
    """Owns a `vllm.LLM`, which `start` makes on its thread. `ended` asks the workers for Fates, by samples' names."""

    def __init__(self, start: Callable[[], Any], ended: Callable[[Sequence[str]], Sequence[Fate]]) -> None:
        self._thread = ThreadPoolExecutor(1, "jackfield-vllm")
        self._fates = ended
        self._waiting: dict[str, tuple[Sample, Future[Ended]]] = {}
        self._asked: deque[object] = deque()  # what stands in the thread's queue
        self._stepping = False  # whether steps are among it
        self._died: BaseException | None = None
        self.llm: Any = None
        try:
            self.llm = self.do(start)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def do(self, call: Callable[..., T], *args: Any) -> T:
        """`call(*args)` on the thread, between two steps; EngineDied once it is closed."""
        return self._later(call, *args).result()

    def submit(self, samples: Sequence[Sample]) -> "list[Future[Ended]]":
        """The samples join the batch, all of them before its next step."""
        futures: list[Future[Ended]] = [Future() for _ in samples]
        self._later(self._add, list(zip(samples, futures, strict=True)))
        return futures

    def abandon(self, samples: Sequence[Sample]) -> None:
        """Those of them that have not ended are aborted, and their blocks ended where they wait."""
        self.do(self._abandon, samples)

    def close(self) -> None:
        """Shuts vLLM down. Who still waits is told EngineDied."""
        if self.llm is not None:
            self.do(self._close)
        self._thread.shutdown()

    # -- on the thread

    def _later(self, call: Callable[..., T], *args: Any) -> "Future[T]":
        self._asked.append(call)
        try:
            return self._thread.submit(self._begun, call, *args)
        except RuntimeError:  # of an executor that is shut down
            raise EngineDied(CLOSED) from None

    def _begun(self, call: Callable[..., T], *args: Any) -> T:
        self._asked.popleft()  # whichever stands there: they are counted
        return call(*args)

    def _add(self, joining: "Sequence[tuple[Sample, Future[Ended]]]") -> None:
        for sample, future in joining:
            self._add_one(sample, future)
        self._go_on()

    def _add_one(self, sample: Sample, future: "Future[Ended]") -> None:
        try:
            if self._died is not None:
                raise _death(self._died)
            self.llm.llm_engine.add_request(sample.name, sample.prompt, sample.params)
        except ValueError as error:
            future.set_exception(InvalidRequest(f"vLLM does not take this request: {error}"))
        except Exception as error:
            future.set_exception(error)
        else:
            self._waiting[sample.name] = sample, future

    def _go_on(self) -> None:
        if self._waiting and not self._stepping:
            self._stepping = True
            self._later(self._steps)

    def _steps(self) -> None:
        """One step after the other, until nobody waits, or something else is asked and is done first."""
        self._stepping = False
        while self._waiting:
            self._step()
            if self._asked:
                break
        self._go_on()

    def _step(self) -> None:
        try:
            outputs = self.llm.llm_engine.step()
            self._deliver([each for each in outputs if each.finished and each.request_id in self._waiting])
        except BaseException as error:
            self._die(error)

    def _deliver(self, outputs: Sequence[Any]) -> None:
        traced = [output.request_id for output in outputs if self._waiting[output.request_id][0].traced]
        fates = dict(zip(traced, self._fates(traced), strict=True)) if traced else {}
        for output in outputs:
            _, future = self._waiting.pop(output.request_id)
            future.set_result(Ended(output, fates.get(output.request_id)))

    def _abandon(self, samples: Sequence[Sample]) -> None:
        names = [sample.name for sample in samples if self._waiting.pop(sample.name, None) is not None]
        if names and self._died is None:
            self.llm.llm_engine.abort_request(names)
            self.llm.collective_rpc("jackfield_drop", args=(names,))

    def _die(self, error: BaseException) -> None:
        self._died = error
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            future.set_exception(_death(error))

    def _close(self) -> None:
        llm, self.llm = self.llm, None
        self._die(EngineDied("it was closed"))
        llm.llm_engine.engine_core.shutdown()


def _death(error: BaseException) -> EngineDied:
    died = EngineDied(f"vLLM's engine died: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
