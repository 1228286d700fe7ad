"""One call of an attention op in a padded batch: what it received, and each request's scores and pattern."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from jackfield.errors import Unavailable
from jackfield.interleave.channel import Selection
from jackfield.interleave.step import Rows
from jackfield.values.anatomy import Projection

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """Where one request's keys stand among the columns of the op: from `first` on, which is token `token`."""

    first: int
    token: int
    length: int  # the whole key axis: every token of the request

    @classmethod
    def of(cls, rows: Rows, step: int, columns: int, padded_length: int) -> "KeyWindow":
        """`columns` keys are given, the last of `padded_length + step` in all; a window may have dropped the rest."""
        dropped = padded_length + step - columns
        first = max(0, rows.pad - dropped)
        return cls(first, dropped + first - rows.pad, rows.num_keys(step))

    def cut(self, keys: Tensor) -> Tensor:
        """This request's columns of [..., column, width]."""
        return keys[..., self.first :, :]

    def spread(self, columns: Tensor, dim: int, fill: float) -> Tensor:
        """Puts `fill` where a window has dropped the first tokens, so that index j on `dim` is token j."""
        if self.token == 0:
            return columns
        padding = [0, 0] * (-dim - 1) + [self.token, 0]
        return functional.pad(columns, padding, value=fill)


class AttentionCall(ABC):
    """q [batch, head, token, d_head], k and v [batch, kv_head, column, d_head / d_value] as the op receives them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, step: int, padded_length: int) -> None:
        self.q, self.k, self.v = q, k, v
        self.step, self.padded_length = step, padded_length
        self.outputs: Tensor | None = None  # [batch, token, head, d_value], when it has run
        self.cache: tuple[Tensor, Tensor] | None = None  # what later steps will attend to
        self.extra: Mapping[str, Any] = {}
        self.prerotary: Mapping[str, Tensor] = {}
        self.gradients = self.one_step = False  # whether what is read stays in the graph; whether no step follows
        self.nodes: Mapping[Projection, Tensor] = {}  # with gradients, pre-rotary heads that the model went on from

    @property
    def groups(self) -> int:
        """Query heads per key/value head; head h uses key/value head h // groups."""
        return self.q.shape[1] // self.k.shape[1]

    def window(self, rows: Rows) -> KeyWindow:
        """Where the request's keys are."""
        return KeyWindow.of(rows, self.step, self.k.shape[2], self.padded_length)

    def new_rows(self, rows: Rows) -> slice:
        """The columns of this step's own keys."""
        return slice(self.k.shape[2] - rows.num_tokens(self.step), None)

    def write_cache(self, which: str, index: int, columns: slice, new: Tensor) -> None:
        """Puts key or value rows [kv_head, column, width] where this op, and later steps, will read them.

        Unavailable where the cache holds something else than the op receives, so that later steps would not see it.
        """
        given: Tensor = getattr(self, which)
        kept = self._kept_beside(given, which, index)
        if self.gradients and (self.cache is None or kept is not None):
            given = given.clone()  # perhaps an output of `split`, which may not be written to in the graph
            setattr(self, which, given)
        given[index, :, columns] = new.to(given.dtype)
        if kept is not None:
            kept.copy_(self._as_kept(given, kept, index))

    def _kept_beside(self, given: Tensor, which: str, index: int) -> Tensor | None:
        """The cache's own copy of the request's rows, where it has one; None where it holds `given` itself."""
        if self.cache is None:
            return None
        kept = self.cache[0 if which == "k" else 1]
        if kept.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            return None
        rows = kept[index]
        if (
            kept.shape[-1] != given.shape[-1]
            or kept.shape[1] % given.shape[1]
            or not self._as_kept(given, rows, index).equal(rows)
        ):
            raise Unavailable(
                "these keys and values cannot be edited: the cache holds something else than the attention receives."
            )
        return rows

    def _as_kept(self, given: Tensor, kept: Tensor, index: int) -> Tensor:
        columns = min(kept.shape[-2], given.shape[-2])
        rows = given[index, :, given.shape[-2] - columns :]
        return rows.repeat_interleave(kept.shape[0] // rows.shape[0], 0)

    @abstractmethod
    def scores(self, rows: Rows, selection: Selection) -> Tensor:
        """[1, head, token, key], float32; masked entries are -inf."""

    @abstractmethod
    def pattern(self, rows: Rows, selection: Selection) -> Tensor:
        """[1, head, token, key], float32; masked entries are 0."""

    @abstractmethod
    def write_scores(self, rows: Rows, selection: Selection, scores: Tensor) -> None:
        """Edited scores, of the shape of `scores`."""

    @abstractmethod
    def write_pattern(self, rows: Rows, selection: Selection, pattern: Tensor) -> None:
        """An edited pattern, of the shape of `pattern`."""
