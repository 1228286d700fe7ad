"""Scores and pattern computed beside an attention op that keeps them to itself: an attention interface, SDPA.

For the rows and heads asked, and never more; only rows that were edited are written over what the op returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.transformers.attention_call import NEGATIVE_INFINITY, AttentionCall
from jackfield.errors import Unavailable
from jackfield.interleave.channel import Selection
from jackfield.interleave.step import Rows


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
        edited = self._taken(scores, rows)
        edited.masked_fill_(self._raw_scores(rows, heads, tokens) == NEGATIVE_INFINITY, NEGATIVE_INFINITY)
        unseeing = (edited == NEGATIVE_INFINITY).all(-1, keepdim=True)  # of these the softmax is NaN
        softmax = self._softmax(edited.masked_fill(unseeing, 0.0), heads)
        self._add(rows, _Patch(heads, tokens, edited, softmax.masked_fill(unseeing, 0.0)))

    def write_pattern(self, rows: Rows, selection: Selection, pattern: Tensor) -> None:
        heads, tokens = self._picks(rows, selection)
        edited = self._taken(pattern, rows)
        edited.masked_fill_(self._raw_scores(rows, heads, tokens) == NEGATIVE_INFINITY, 0.0)
        self._add(rows, _Patch(heads, tokens, None, edited))

    def _taken(self, new: Tensor, rows: Rows) -> Tensor:
        """A copy of the columns of what a block gave back; in the graph where one is kept."""
        own = new[0, :, :, self.window(rows).token :]
        return (own if self.gradients else own.detach()).clone()

    @property
    def edited(self) -> bool:
        """Whether any request edited its scores or pattern."""
        return bool(self._patches)

    def overwrite(self, outputs: Tensor) -> None:
        """Writes the edited rows over the op's outputs [batch, token, head, d_value]; no other row is touched."""
        for rows, patches in self._patches.values():
            written = torch.zeros(self.q.shape[1], rows.num_tokens(self.step), dtype=torch.bool, device=outputs.device)
            for patch in patches:
                self._overwrite(outputs, rows, patch, written)

    def _overwrite(self, outputs: Tensor, rows: Rows, patch: _Patch, written: Tensor) -> None:
        """`written` [head, token] are the rows written over so far: one that is put back as it was is written too."""
        heads, tokens = (torch.tensor(picks, device=outputs.device) for picks in (patch.heads, patch.tokens))
        changed = self._changed(rows, patch) | written[heads[:, None], tokens]
        written[heads[:, None], tokens] |= changed
        values = self.window(rows).cut(self.v[rows.index])[[head // self.groups for head in patch.heads]]
        mixed = torch.matmul(patch.pattern, values.float()).to(outputs.dtype)
        first = rows.pad if self.step == 0 else 0
        picked_heads, picked_tokens = changed.nonzero(as_tuple=True)
        outputs[rows.index, first + tokens[picked_tokens], heads[picked_heads]] = mixed[changed]

    def _changed(self, rows: Rows, patch: _Patch) -> Tensor:
        """Which rows [head, token] are computed out of the patch: with gradients all, so that they reach it."""
        if self.gradients:
            return torch.ones(patch.pattern.shape[:2], dtype=torch.bool, device=patch.pattern.device)
        plain = self._softmax(self._raw_scores(rows, patch.heads, patch.tokens), patch.heads)
        return (patch.pattern != plain).any(-1)

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
        return torch.softmax(scores, -1)


def _overlay(target: Tensor, heads: tuple[int, ...], tokens: tuple[int, ...], patch: _Patch, new: Tensor) -> None:
    """Copies of `new`, which stands for the patch's heads and tokens, those that `target` stands for."""
    to_head, from_head = _shared(heads, patch.heads)
    to_token, from_token = _shared(tokens, patch.tokens)
    target[to_head[:, None], to_token] = new[from_head[:, None], from_token]


def _shared(wanted: Sequence[int], patched: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where the numbers that are in both stand in one and in the other."""
    places = {number: place for place, number in enumerate(patched)}
    pairs = [(place, places[number]) for place, number in enumerate(wanted) if number in places]
    both = torch.tensor(pairs, dtype=torch.long, device="cpu").reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _additive_mask(call: Beside, rows: Rows) -> Tensor | None:
    window, tokens = call.window(rows), rows.tokens(call.step)
    mask, columns = call.mask, call.k.shape[2]
    if mask is None:
        return _causal_mask(rows.num_tokens(call.step), columns - window.first, call.q.device) if call.causal else None
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise Unavailable(
            f"scores and pattern: the attention was given a mask of type {type(mask).__name__}, unreadable here."
        )
    own = mask[rows.index if mask.shape[0] > 1 else 0, :, tokens, window.first : columns]
    if own.dtype == torch.bool:
        return torch.zeros(own.shape, dtype=torch.float32, device=own.device).masked_fill_(~own, NEGATIVE_INFINITY)
    # Not in place: of a float32 mask this is a view, and the model has it still.
    return own.float().masked_fill(own <= torch.finfo(own.dtype).min / 2, NEGATIVE_INFINITY)


def _causal_mask(tokens: int, columns: int, device: torch.device) -> Tensor | None:
    if tokens == 1:
        return None
    mask = torch.full((tokens, columns), NEGATIVE_INFINITY, dtype=torch.float32, device=device)
    return mask.triu_(columns - tokens + 1)[None]
