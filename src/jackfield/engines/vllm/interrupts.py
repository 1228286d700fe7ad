"""Ctrl-C goes to every process of a terminal. The client ends what it waits for; the engine it waited for goes on."""

import multiprocessing
import signal
import threading

NAMES = ("EngineCore", "VllmWorker")  # of vLLM's own processes, 0.25 to 0.33


def leave_to_client() -> None:
    """In a process of vLLM's own: interrupts are not heard. It ends with its client, or by SIGTERM."""
    own = multiprocessing.current_process().name.startswith(NAMES)
    if own and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
