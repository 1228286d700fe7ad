"""The scores and the pattern of an attention op that does its own softmax, edited where they are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from jackfield.engines.transformers.attention_call import NEGATIVE_INFINITY, AttentionCall
from jackfield.interleave.channel import Selection
from jackfield.interleave.step import Rows


class Inline(AttentionCall):
    """The scores and the pattern of an op that does its own softmax: [batch, head, token, column], as they pass."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, step: int, padded_length: int) -> None:
        super().__init__(q, k, v, step, padded_length)
        self.current: Tensor | None = None  # what passes now
        self.replaced = False
        self._given = (k, v)
        self._unseen: list[tuple[int, Tensor]] = []

    def write_cache(self, which: str, index: int, columns: slice, new: Tensor) -> None:
        """Puts the rows into a tensor of its own: whoever listens to the op brings it to the cache."""
        given: Tensor = getattr(self, which)
        if given is self._given["kv".index(which)]:
            given = given.clone()
            setattr(self, which, given)
        given[index, :, columns] = new.to(given.dtype)

    def arrive(self, tensor: Tensor) -> None:
        """The scores, or later the pattern, pass."""
        self.current, self.replaced = tensor, False

    def depart(self) -> Tensor | None:
        """What goes on instead, where something was edited."""
        return self.current if self.replaced else None

    def scores(self, rows: Rows, selection: Selection) -> Tensor:
        scores = self._own(rows).float()
        scores = scores.masked_fill(self._masked(self._own(rows)), NEGATIVE_INFINITY)
        return _pick(self.window(rows).spread(scores, -1, NEGATIVE_INFINITY)[None], selection)

    def pattern(self, rows: Rows, selection: Selection) -> Tensor:
        pattern = self._own(rows).float().clone()
        return _pick(self.window(rows).spread(pattern, -1, 0.0)[None], selection)

    def write_scores(self, rows: Rows, selection: Selection, scores: Tensor) -> None:
        edited = self._merged(self.scores(rows, Selection()), selection, scores)[0, :, :, self.window(rows).token :]
        own = self._own(rows)
        lowest = torch.finfo(own.dtype).min
        edited = torch.where(self._masked(own), own, edited.to(own.dtype)).clamp(min=lowest)
        self._unseen.append((rows.index, (edited <= lowest / 2).all(-1, keepdim=True)))
        self._put(rows, edited)

    def write_pattern(self, rows: Rows, selection: Selection, pattern: Tensor) -> None:
        whole = self.pattern(rows, Selection())
        edited = self._merged(whole, selection, pattern)
        edited = torch.where(self._hidden[rows.index], torch.zeros_like(edited), edited)
        self._put(rows, edited[0, :, :, self.window(rows).token :])

    def after_softmax(self, workers_rows: Sequence[Rows]) -> None:
        """Rows that an edit left with nothing to see write zeros."""
        for index, unseen in self._unseen:
            rows = next(rows for rows in workers_rows if rows.index == index)
            self._put(rows, self._own(rows).masked_fill(unseen, 0.0))

    _hidden: dict[int, Tensor]

    def remember_mask(self, workers_rows: Sequence[Rows]) -> None:
        """Which entries each request may not see: they stay so whatever is written to the pattern."""
        self._hidden = {
            rows.index: self.window(rows).spread(self._masked(self._own(rows)).float(), -1, 1.0)[None].bool()
            for rows in workers_rows
        }

    def _own(self, rows: Rows) -> Tensor:
        assert self.current is not None
        return self.current[rows.index, :, rows.tokens(self.step), self.window(rows).first :]

    @staticmethod
    def _masked(scores: Tensor) -> Tensor:
        # Masked with the lowest number there is; codegen divides that by its scale.
        return scores <= max(torch.finfo(scores.dtype).min / 2, -1e30)

    def _put(self, rows: Rows, new: Tensor) -> None:
        assert self.current is not None
        if not self.replaced:
            self.current, self.replaced = self.current.clone(), True
        self.current[rows.index, :, rows.tokens(self.step), self.window(rows).first :] = new.to(self.current.dtype)

    @staticmethod
    def _merged(whole: Tensor, selection: Selection, part: Tensor) -> Tensor:
        if selection == Selection():
            return part
        merged = whole.clone()
        heads = list(selection.heads) if selection.heads is not None else list(range(whole.shape[1]))
        tokens = list(selection.tokens) if selection.tokens is not None else list(range(whole.shape[2]))
        merged[:, torch.tensor(heads)[:, None], torch.tensor(tokens)[None, :]] = part
        return merged


def _pick(whole: Tensor, selection: Selection) -> Tensor:
    if selection.heads is not None:
        whole = whole[:, list(selection.heads)]
    if selection.tokens is not None:
        whole = whole[:, :, list(selection.tokens)]
    return whole
