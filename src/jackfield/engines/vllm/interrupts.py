"""How vLLM's own processes go with their client: not at its Ctrl-C, which reaches them as well, but when it is gone.

An interrupt ends what the client waits for, and the engine goes on. A client that dies without a word, killed or out of
memory, would leave vLLM's engine behind, and the GPU's memory with it.
"""

import multiprocessing
import os
import signal
import threading
import time
from typing import Final

NAMES: Final = ("EngineCore", "VllmWorker")  # of vLLM's own processes, 0.25 to 0.33
WATCHED_S: Final = 1.0
GRACE_S: Final = 10.0


def is_apart() -> bool:
    """Whether this is a process of vLLM's own, and not its client's."""
    return multiprocessing.current_process().name.startswith(NAMES)


def follow_client() -> None:
    """In a process of vLLM's own: interrupts are not heard, and it ends soon after the process that started it."""
    if is_apart() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(os.getppid(),), name="jackfield-client", daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCHED_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
