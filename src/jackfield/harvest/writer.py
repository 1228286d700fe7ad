"""Writing beside the run: one thread, one write at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec

P = ParamSpec("P")


class Writer:
    """Does one thing while its caller goes on, and lets nobody run ahead: the second has to wait for the first.

    An error of one is raised by the call after it, or by `wait`; nothing is done after an error.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jackfield-harvest")
        self._last: Future[None] | None = None

    def do(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Begins `work` when what was begun before is done."""
        self.wait()
        self._last = self._thread.submit(work, *args, **kwargs)

    def wait(self) -> None:
        """Until everything is done."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()
