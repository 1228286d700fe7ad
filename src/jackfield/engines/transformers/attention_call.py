"""One call of an attention op in a padded batch: what it received, and each request's scores and pattern.

`Beside` computes scores next to an op that keeps them to itself (an attention interface, SDPA): for the rows and heads
asked, and only rows that were edited are written over what the op returned. `Inline` has the tensors of an op that
does its own softmax, and edits them where they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jackfield.errors import Unavailable
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Selection

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """Where one request's keys stand among the columns of the op: columns `first` on, of which the first is token `token`."""

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
        """Puts key or value rows [kv_head, column, width] where this op, and later steps, will read them."""
        given: Tensor = getattr(self, which)
        given[index, :, columns] = new.to(given.dtype)
        if self.cache is None:
            return
        kept = self.cache[0 if which == "k" else 1]
        if kept.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            return
        self._copy_to_cache(kept, given, index)

    def _copy_to_cache(self, kept: Tensor, given: Tensor, index: int) -> None:
        columns = min(kept.shape[2], given.shape[2])
        rows = given[index, :, given.shape[2] - columns :]
        kept[index, :, kept.shape[2] - columns :] = rows.repeat_interleave(kept.shape[1] // rows.shape[0], 0)

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


@dataclass(slots=True)
class _Patch:
    heads: tuple[int, ...]
    tokens: tuple[int, ...]  # rows of the request
    scores: Tensor | None  # [head, token, column]
    pattern: Tensor


class Masks:
    """Additive float32 masks, one per mask tensor and request, made once a step."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], tuple[Tensor | None, Tensor | None]] = {}

    def clear(self) -> None:
        """Forgets the masks of a step that is over."""
        self._made.clear()

    def get(self, call: "Beside", rows: Rows) -> Tensor | None:
        """[1 or head, token, column] of 0, biases and -inf; None where everything is seen."""
        key = (id(call.mask), rows.index, call.k.shape[2])
        if key not in self._made:
            self._made[key] = (call.mask, _additive_mask(call, rows))  # the mask too: its id must stay its own
        return self._made[key][1]


class Beside(AttentionCall):
    """Scores and pattern computed beside an op, from what it receives."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: int,
        padded_length: int,
        *,
        mask: Any,
        masks: Masks,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        causal: bool,
        refusal: str | None = None,
    ) -> None:
        super().__init__(q, k, v, step, padded_length)
        self.mask, self.masks, self.causal = mask, masks, causal
        self.scale = scale if scale is not None else q.shape[-1] ** -0.5
        self.softcap, self.sinks, self.refusal = softcap, sinks, refusal
        self._patches: dict[int, tuple[Rows, list[_Patch]]] = {}

    def scores(self, rows: Rows, selection: Selection) -> Tensor:
        heads, tokens = self._picks(rows, selection)
        scores = self._raw_scores(rows, heads, tokens, whole=selection == Selection())
        for patch in self._patches_of(rows):
            if patch.scores is not None:
                _overlay(scores, heads, tokens, patch, patch.scores)
        return self.window(rows).spread(scores, -1, NEGATIVE_INFINITY)[None]

    def pattern(self, rows: Rows, selection: Selection) -> Tensor:
        heads, tokens = self._picks(rows, selection)
        pattern = self._softmax(self._raw_scores(rows, heads, tokens, whole=selection == Selection()), heads)
        for patch in self._patches_of(rows):
            _overlay(pattern, heads, tokens, patch, patch.pattern)
        return self.window(rows).spread(pattern, -1, 0.0)[None]

    def write_scores(self, rows: Rows, selection: Selection, scores: Tensor) -> None:
        heads, tokens = self._picks(rows, selection)
        edited = scores[0, :, :, self.window(rows).token :].detach().clone()
        edited.masked_fill_(self._raw_scores(rows, heads, tokens) == NEGATIVE_INFINITY, NEGATIVE_INFINITY)
        self._add(rows, _Patch(heads, tokens, edited, self._softmax(edited, heads)))

    def write_pattern(self, rows: Rows, selection: Selection, pattern: Tensor) -> None:
        heads, tokens = self._picks(rows, selection)
        edited = pattern[0, :, :, self.window(rows).token :].detach().clone()
        edited.masked_fill_(self._raw_scores(rows, heads, tokens) == NEGATIVE_INFINITY, 0.0)
        self._add(rows, _Patch(heads, tokens, None, edited))

    @property
    def edited(self) -> bool:
        """Whether any request edited its scores or pattern."""
        return bool(self._patches)

    def overwrite(self, outputs: Tensor) -> None:
        """Writes the edited rows over the op's outputs [batch, token, head, d_value]; no other row is touched."""
        for rows, patches in self._patches.values():
            for patch in patches:
                self._overwrite(outputs, rows, patch)

    def _overwrite(self, outputs: Tensor, rows: Rows, patch: _Patch) -> None:
        plain = self._softmax(self._raw_scores(rows, patch.heads, patch.tokens), patch.heads)
        changed = (patch.pattern != plain).any(-1)
        values = self.window(rows).cut(self.v[rows.index])[[head // self.groups for head in patch.heads]]
        mixed = torch.matmul(patch.pattern, values.float()).to(outputs.dtype)
        first = rows.pad if self.step == 0 else 0
        index = torch.tensor([first + token for token in patch.tokens], device=outputs.device)
        heads = torch.tensor(patch.heads, device=outputs.device)
        picked_heads, picked_tokens = changed.nonzero(as_tuple=True)
        outputs[rows.index, index[picked_tokens], heads[picked_heads]] = mixed[changed]

    def _add(self, rows: Rows, patch: _Patch) -> None:
        self._patches.setdefault(rows.index, (rows, []))[1].append(patch)

    def _patches_of(self, rows: Rows) -> Sequence[_Patch]:
        return self._patches[rows.index][1] if rows.index in self._patches else ()

    def _picks(self, rows: Rows, selection: Selection) -> tuple[tuple[int, ...], tuple[int, ...]]:
        heads = selection.heads if selection.heads is not None else tuple(range(self.q.shape[1]))
        tokens = selection.tokens if selection.tokens is not None else tuple(range(rows.num_tokens(self.step)))
        return heads, tokens

    def _raw_scores(
        self, rows: Rows, heads: tuple[int, ...], tokens: tuple[int, ...], *, whole: bool = False
    ) -> Tensor:
        """[head, token, column]: scaled, capped, masked."""
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        queries = self.q[rows.index, :, rows.tokens(self.step)]
        keys = self.window(rows).cut(self.k[rows.index])
        mask = self.masks.get(self, rows)
        if whole and self.softcap is None and (mask is None or mask.shape[0] == 1):
            return self._grouped_scores(queries, keys, mask)
        queries = queries[list(heads)][:, list(tokens)].float()
        scores = (
            torch.matmul(queries, keys[[head // self.groups for head in heads]].float().transpose(-1, -2)) * self.scale
        )
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is None:
            return scores
        picked = mask[list(heads)] if mask.shape[0] > 1 else mask
        return scores + picked[:, list(tokens)]

    def _grouped_scores(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """One product per key/value head for all its query heads: keys are not repeated, and the mask rides along."""
        heads, tokens, width = queries.shape
        grouped = queries.float().reshape(keys.shape[0], self.groups * tokens, width)
        columns = keys.float().transpose(-1, -2)
        if mask is None:
            scores = torch.bmm(grouped, columns).mul_(self.scale)
        else:
            scores = torch.baddbmm(mask.repeat(1, self.groups, 1), grouped, columns, alpha=self.scale)
        return scores.view(heads, tokens, -1)

    def _softmax(self, scores: Tensor, heads: tuple[int, ...]) -> Tensor:
        if self.sinks is not None:
            sinks = self.sinks.float()[list(heads)][:, None, None].expand(-1, scores.shape[1], 1)
            return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        pattern = torch.softmax(scores, -1)
        if self._patches:  # only an edit can leave a row with nothing to see
            pattern.masked_fill_((scores == NEGATIVE_INFINITY).all(-1, keepdim=True), 0.0)
        return pattern


def _overlay(target: Tensor, heads: tuple[int, ...], tokens: tuple[int, ...], patch: _Patch, new: Tensor) -> None:
    """Copies of `new`, which stands for the patch's heads and tokens, those that `target` stands for."""
    for to_head, head in enumerate(heads):
        if head not in patch.heads:
            continue
        for to_token, token in enumerate(tokens):
            if token in patch.tokens:
                target[to_head, to_token] = new[patch.heads.index(head), patch.tokens.index(token)]


def _additive_mask(call: Beside, rows: Rows) -> Tensor | None:
    window, tokens = call.window(rows), rows.tokens(call.step)
    mask, columns = call.mask, call.k.shape[2]
    if mask is None:
        return _causal_mask(rows.num_tokens(call.step), columns - window.first, call.q.device) if call.causal else None
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise Unavailable(
            f"scores and pattern: the attention was given a mask of type {type(mask).__name__}, which cannot be read here."
        )
    own = mask[rows.index if mask.shape[0] > 1 else 0, :, tokens, window.first : columns]
    if own.dtype == torch.bool:
        return torch.zeros(own.shape, device=own.device).masked_fill_(~own, NEGATIVE_INFINITY)
    return own.float().masked_fill_(own <= torch.finfo(own.dtype).min / 2, NEGATIVE_INFINITY)


def _causal_mask(tokens: int, columns: int, device: torch.device) -> Tensor | None:
    if tokens == 1:
        return None
    mask = torch.full((tokens, columns), NEGATIVE_INFINITY, device=device)
    return mask.triu_(columns - tokens + 1)[None]


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
        return scores <= torch.finfo(scores.dtype).min / 2

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
