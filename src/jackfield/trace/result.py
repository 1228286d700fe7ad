"""What comes back from one prompt."""

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Result:
    """One prompt's continuation, and what its block kept.

    `text`, `token_ids`, `finish_reason` ("stop", "length", "stopped", "error"), `logprobs`, `saved` (by name),
    `returned` (what a block function returned) and `error`; with n > 1 these are lists of n.
    """

    prompt_token_ids: list[int]
    text: Any
    token_ids: Any
    finish_reason: Any
    logprobs: Any
    saved: Any
    returned: Any
    error: Any


def without_traceback(error: Exception | None) -> Exception | None:
    """A copy to keep beside results: the error that was raised leads, by its traceback, back to whoever holds it."""
    if error is None:
        return None
    try:
        return copy.copy(error)
    except Exception:  # an exception class whose constructor wants more than its args
        return RuntimeError(f"{type(error).__name__}: {error}")
