"""A harvest as it is read: shard by shard, in the order of the prompts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from jackfield.errors import HarvestError, UnknownValue, near
from jackfield.harvest.manifest import Failure, Manifest, ShardEntry
from jackfield.harvest.stored import Stored

safe_open: Any = safetensors.safe_open  # it has no types


class Harvest:
    """What `model.harvest` wrote to a folder: a sequence of shards, each a dict of tensors [row, ...] by name.

    Rows are in the order of the prompts, and within a prompt in that of its tokens. Beside the sites there are, for
    each row, `prompt` (its number) and `positions` and `token_ids`, or of means `count`. A shard's memory is read from
    the disk where it is used. A harvest that is not finished has the shards that are there so far.

    >>> harvest = Harvest("activations")                                            # doctest: +SKIP
    >>> for shard in harvest:                                                       # doctest: +SKIP
    ...     train(shard["layers.12.layer_output"], shard["token_ids"])

    Raises HarvestError where the folder holds none, or files of it are gone.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._manifest = Manifest.read(self.folder)
        for entry in self._manifest.shards:
            _check(self.folder, entry)

    @property
    def finished(self) -> bool:
        """Whether it came to the end of its prompts."""
        return self._manifest.finished

    @property
    def prompts(self) -> int:
        """How many prompts are done, those that failed included."""
        return self._manifest.prompts

    @property
    def tokens(self) -> int:
        """How many tokens the prompts have that gave rows."""
        return self._manifest.tokens

    @property
    def rows(self) -> int:
        """How many rows all shards have together."""
        return self._manifest.rows

    @property
    def failed(self) -> tuple[Failure, ...]:
        """The prompts without rows: each its number, the name of its error and the message."""
        return self._manifest.failed

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The names in each shard, with the dtype and the shape of one row."""
        return MappingProxyType(self._manifest.tensors)

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """The files, with their prompts and their rows."""
        return self._manifest.shards

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.folder / self.shards[number].file)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[number] for number in range(len(self)))

    def read(self, name: str) -> Tensor:
        """All rows of one tensor [row, ...], in memory. UnknownValue for a name that is not in the shards."""
        if name not in self.tensors:
            has = ", ".join(self.tensors) or "no rows yet"
            raise UnknownValue(f"{self.folder} has no {name!r}; it has {has}.{near(name, self.tensors)}")
        return torch.cat([shard[name] for shard in self])

    def __repr__(self) -> str:
        state = "" if self.finished else ", not finished"
        return f"<Harvest {str(self.folder)!r}: {self.prompts} prompts, {self.rows} rows in {len(self)} shards{state}>"


def _check(folder: Path, entry: ShardEntry) -> None:
    """HarvestError for a shard that is not there whole."""
    path = folder / entry.file
    try:
        with safe_open(path, "pt") as file:
            (rows,) = file.get_slice("prompt").get_shape()
    except (OSError, safetensors.SafetensorError) as error:
        raise HarvestError(
            f"{path} is named by the manifest and cannot be read: {error}. Bring it back, or take another folder."
        ) from None
    if rows != entry.rows:
        raise HarvestError(f"{path} has {rows} rows, and the manifest names {entry.rows}.")
