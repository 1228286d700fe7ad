"""What comes back from one prompt."""

import copy
import reprlib
import traceback
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


class Brief(reprlib.Repr):
    """How a result shows what it holds: tensors by shape and dtype, long lists by their beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 12
        self.maxstring = self.maxother = 80

    def repr_Tensor(self, tensor: Tensor, level: int) -> str:  # noqa: N802 - reprlib finds it by the type's name
        """`<Tensor (1, 9, 5, 5) float32>`."""
        return f"<Tensor {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}>"


@dataclass(slots=True, repr=False)
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

    def __repr__(self) -> str:
        brief = Brief()
        shown = (f"{each.name}={brief.repr(getattr(self, each.name))}" for each in fields(self))
        return f"Result({', '.join(shown)})"


def without_traceback(error: Exception | None) -> Exception | None:
    """A copy to keep beside results: the error that was raised leads, by its traceback, back to whoever holds it."""
    if error is None:
        return None
    try:
        return copy.copy(error)
    except Exception:  # an exception class whose constructor wants more than its args
        return RuntimeError(f"{type(error).__name__}: {error}")


def letting_go(error: Exception) -> Exception:
    """The error, with its lines, but without the local variables of the frames it passed: they hold a block's tensors.

    For errors that are kept while other prompts run. Those that it came of are treated likewise.
    """
    waiting: list[BaseException | None] = [error]
    seen = set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        waiting += [each.__cause__, each.__context__]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return error
