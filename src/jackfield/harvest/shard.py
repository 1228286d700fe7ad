"""Rows on their way into one file."""

from collections.abc import Mapping

from torch import Tensor

from jackfield.harvest.asked import Limits


class Shard:
    """The rows of consecutive prompts."""

    def __init__(self) -> None:
        self.num_rows = self.num_bytes = self.num_prompts = 0
        self.tensors: dict[str, list[Tensor]] = {}

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Takes copies of the rows of the next prompt, each [row, ...]."""
        for name, each in rows.items():
            # What an engine hands over may be memory that it maps, and every mapping holds a file open: those of a
            # whole shard are more than a process may have.
            self.tensors.setdefault(name, []).append(each.clone())
            self.num_bytes += each.nbytes
        self.num_rows += len(next(iter(rows.values())))
        self.num_prompts += 1

    def is_full(self, limits: Limits) -> bool:
        """Whether it is to be written."""
        return self.num_prompts >= limits.shard_prompts or self.num_bytes >= limits.shard_mb * 10**6
