"""Cache blocks of requests that edited something, cleaned before they are another request's.

vLLM hands a freed block on as it is. Its attention multiplies the rows that the next request has not filled by zeros,
which is right for every number: where an edit has left NaN or an infinity there, it makes NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.vllm.attention import behind_window
from jackfield.engines.vllm.rows import Runner


@dataclass(frozen=True, slots=True)
class Cached:
    """A layer with keys of its own in a cache: vLLM's name for it, how many a query sees (None: all), where blocks are
    told apart.
    """

    name: str
    layer: Any
    window: int | None
    block_axis: int

    def clean(self, blocks: Tensor) -> None:
        """Zeros are in these blocks [block] from now on."""
        cache: Tensor = self.layer.kv_cache
        plain = cache if cache.element_size() > 1 else cache.view(torch.uint8)  # 8 bit floats cannot be filled
        plain.index_fill_(self.block_axis, blocks, 0)


@dataclass(frozen=True, slots=True)
class _Span:
    """Blocks of a request: those that its windows had not left when so many positions were `computed`; all of them, or
    those that they have left with `now` positions.
    """

    request_id: str
    computed: int
    now: int | None = None

    def places(self, window: int | None, block_size: int) -> slice:
        """Which of its blocks, in order of position."""
        last = None if self.now is None else behind_window(window, self.now) // block_size
        return slice(behind_window(window, self.computed) // block_size, last)


class Cleaning:
    """What is cleaned, and when: with the pass in which others may first have the blocks, and before it runs.

    Nothing waits for the device. A block that a window has left is another request's as well, while its own goes on.
    """

    def __init__(self, layers: Sequence[Cached], rows: Runner) -> None:
        self._layers, self._rows = layers, rows
        self._windowed = [each for each in layers if each.window is not None]
        self._away = set[str]()  # preempted, and not back: their blocks, of which a runner may tell still, are others'
        self._computed: dict[str, int] = {}  # positions when the last pass was scheduled, where there are windows

    def arrive(self, scheduled: Any, is_traced: Callable[[str], bool], has_edited: Callable[[str], bool]) -> None:
        """A pass has been scheduled, of which the runner has not been told."""
        leaving = scheduled.finished_req_ids.union(scheduled.preempted_req_ids or ())
        losing = [each for each in leaving if has_edited(each) and each not in self._away]
        self._clean(self._layers, [_Span(each, self._computed.get(each, 0)) for each in losing])
        self._away = self._away.union(scheduled.preempted_req_ids or ())
        self._away -= scheduled.finished_req_ids | scheduled.num_scheduled_tokens.keys()
        if self._windowed:
            for each in leaving:
                self._computed.pop(each, None)
            self._follow(_computed(scheduled, is_traced), has_edited)

    def _follow(self, now: Mapping[str, int], has_edited: Callable[[str], bool]) -> None:
        """Windows go on: what they leave behind is cleaned."""
        spans = [_Span(each, self._computed.get(each, 0), now[each]) for each in now if has_edited(each)]
        self._clean(self._windowed, [span for span in spans if self._leaves(span)])
        self._computed.update(now)

    def _leaves(self, span: _Span) -> bool:
        found = (span.places(each.window, self._rows.block_size(each.name)) for each in self._windowed)
        return any(places.start < places.stop for places in found)

    def _clean(self, layers: Sequence[Cached], spans: Sequence[_Span]) -> None:
        if not spans:
            return
        blocks: dict[tuple[int, int | None], Tensor] = {}
        with torch.inference_mode():
            for each in layers:
                key = self._rows.group(each.name), each.window
                if key not in blocks:
                    blocks[key] = torch.cat([self._blocks(each, span) for span in spans])
                each.clean(blocks[key])

    def _blocks(self, cached: Cached, span: _Span) -> Tensor:
        places = span.places(cached.window, self._rows.block_size(cached.name))
        return self._rows.held(cached.name, span.request_id, places)


def _computed(scheduled: Any, is_traced: Callable[[str], bool]) -> Mapping[str, int]:
    """How many positions of each traced request have been computed before this pass."""
    running, new = scheduled.scheduled_cached_reqs, scheduled.scheduled_new_reqs
    found = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    found |= {each.req_id: each.num_computed_tokens for each in new}
    return {each: computed for each, computed in found.items() if is_traced(each)}
