"""The vLLMs that stand in this process itself, and not in processes of their own.

vLLM keeps its groups and workspaces in globals of its modules, and an engine that is shut down takes them from all that
stand beside it. So one that is let go of waits here until the last of them is, and they are shut down together.
"""

import functools
import gc
import threading
from typing import Any

from jackfield.engines.vllm.foreign import foreign


class Residents:
    """Those that are in use, and those that wait to be shut down."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection may end a model on the thread that has it
        self._used: list[Any] = []
        self._left: list[Any] = []

    def settle(self, llm: Any) -> None:
        """A `vllm.LLM` has been made."""
        if isinstance(llm.llm_engine.engine_core, foreign("vllm.v1.engine.core_client", "InprocClient")):
            with self._lock:
                self._used.append(llm)

    def leave(self, llm: Any) -> None:
        """Nobody uses it any more: shuts it down, now or later."""
        if llm not in self._used:
            llm.llm_engine.engine_core.shutdown()
            return
        with self._lock:
            self._used.remove(llm)
            self._left.append(llm)
            if self._used:
                gc.unfreeze()  # vLLM hides what there is from collection, and with it models that nobody has any more
                gc.collect()
            while self._left and not self._used:
                self._left.pop(0).llm_engine.engine_core.shutdown()


@functools.cache
def residents() -> Residents:
    """Those of this process: one object, since what they share is the process's as well."""
    return Residents()
