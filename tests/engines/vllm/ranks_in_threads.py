"""Ranks that are threads of this process: what each has is exchanged as ranks of processes would."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from jackfield.engines.vllm.parts import Ranks

T = TypeVar("T")
PATIENCE_S = 20.0


class _Exchange:
    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)


class ThreadRanks:
    """What `Ranks` is to its users, over threads."""

    def __init__(self, exchange: _Exchange, rank: int, size: int) -> None:
        self._exchange, self.rank, self.size = exchange, rank, size

    def told(self, what: Any) -> list[Any]:
        self._exchange.said[self.rank] = what
        self._exchange.barrier.wait()
        heard = list(self._exchange.said)
        self._exchange.barrier.wait()
        return heard

    def gathered(self, part: Tensor) -> Tensor:
        return torch.stack(self.told(part))

    def agree(self, what: str) -> bool:
        return set(self.told(what)) == {what}


def on_ranks(size: int, body: Callable[[Ranks], T]) -> list[T]:
    """What `body` gives on each rank."""
    exchange = _Exchange(size)
    with ThreadPoolExecutor(size) as threads:
        ranks = [cast("Ranks", ThreadRanks(exchange, rank, size)) for rank in range(size)]
        return [each.result() for each in [threads.submit(body, own) for own in ranks]]
