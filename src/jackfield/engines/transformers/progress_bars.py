"""transformers' progress bars, drawn only where there is something to wait for.

A small model is loaded in less time than it takes to read a bar. What downloads has bars of the hub's own, which are
not touched.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from transformers.utils import logging

PATIENCE_S: Final = 2.0


@contextmanager
def late_progress_bars() -> Generator[None]:
    """Inside, a bar of transformers appears once it has run for PATIENCE_S, and is gone when it is done.

    Whoever has set a hook for these bars keeps it, and bars that are turned off stay off.
    """
    previous = logging.set_tqdm_hook(_late)
    if previous is not None:
        logging.set_tqdm_hook(previous)
    try:
        yield
    finally:
        last = logging.set_tqdm_hook(None)
        if last is not _late:
            logging.set_tqdm_hook(last)


def _late(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bar(*args, **{"delay": PATIENCE_S, "leave": False, **kwargs})
