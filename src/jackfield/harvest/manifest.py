"""The manifest of a harvest: what was asked, how far it is, and which files count.

    {"format": 1, "jackfield": "0.1.0", "asked": {...}, "finished": false, "prompts": 1200, "tokens": 34567,
     "digest": "<of these prompts>", "tensors": {"layers.4.layer_output": {"dtype": "float32", "shape": [576]}, ...},
     "shards": [{"file": "harvest-00000.safetensors", "prompts": [0, 600], "rows": 17000}, ...],
     "failed": [{"prompt": 17, "error": "RequestTooLong", "message": "..."}]}

`prompts` counts those that are done, in shards or failed; the next to be run has that number.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from jackfield.errors import HarvestError
from jackfield.harvest.stored import Stored
from jackfield.version import __version__

FORMAT: Final = 1
"""Raised when a reader of the last one would misunderstand what is written."""
NAME: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One finished file: its prompts, from and up to, and how many rows they gave."""

    file: str
    prompts: tuple[int, int]
    rows: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that has no rows, and why."""

    prompt: int
    error: str
    message: str

    @classmethod
    def of(cls, prompt: int, error: Exception) -> "Failure":
        """What is kept of an error."""
        return cls(prompt, type(error).__name__, str(error))


@dataclass(frozen=True, slots=True)
class Manifest:
    """How far a harvest is."""

    asked: Mapping[str, Any]
    jackfield: str = __version__
    finished: bool = False
    prompts: int = 0
    tokens: int = 0
    digest: str = ""
    tensors: Mapping[str, Stored] = field(default_factory=dict[str, Stored])
    shards: tuple[ShardEntry, ...] = ()
    failed: tuple[Failure, ...] = ()

    @property
    def rows(self) -> int:
        """Of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def next_file(self) -> str:
        """What the next shard is called."""
        return f"harvest-{len(self.shards):05}.safetensors"

    def with_shard(self, rows: int) -> "Manifest":
        """With one more shard, of the prompts that are done and in none yet."""
        first = self.shards[-1].prompts[1] if self.shards else 0
        return replace(self, shards=(*self.shards, ShardEntry(self.next_file, (first, self.prompts), rows)))

    def check_asked(self, asked: Mapping[str, Any], folder: Path) -> None:
        """HarvestError, with every difference, where something else was asked for than what is there."""
        found = list(_differences(self.asked, asked, ""))
        if found:
            raise HarvestError(
                f"{folder} holds a harvest that was asked for otherwise: {'; '.join(found)}. Ask for the same, and it "
                "goes on, or give another folder."
            )

    def written(self) -> str:
        """As JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """That of a folder; HarvestError where there is none that can be read."""
        try:
            listed = json.loads((folder / NAME).read_text(encoding="utf-8"))
            found = listed.pop("format")
        except FileNotFoundError:
            raise HarvestError(f"{folder} holds no harvest: there is no {NAME} in it.") from None
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise HarvestError(f"{folder / NAME} cannot be read: {error!r}.") from None
        if found != FORMAT:
            raise HarvestError(
                f"{folder / NAME} is of format {found!r}, and this version of jackfield reads format {FORMAT}. Install "
                "the version that wrote it."
            )
        return _parsed(listed, folder)


def _parsed(listed: dict[str, Any], folder: Path) -> Manifest:
    try:
        tensors = {name: Stored(each["dtype"], tuple(each["shape"])) for name, each in listed.pop("tensors").items()}
        shards = [ShardEntry(each["file"], tuple(each["prompts"]), each["rows"]) for each in listed.pop("shards")]
        failed = [Failure(**each) for each in listed.pop("failed")]
        return Manifest(**listed, tensors=tensors, shards=tuple(shards), failed=tuple(failed))
    except (KeyError, TypeError, AttributeError) as error:
        raise HarvestError(f"{folder / NAME} is no manifest of a harvest: {error!r}.") from None


def _differences(there: Any, now: Any, name: str) -> Iterator[str]:
    """`dtype: None there, 'float16' now`, for each place in which two documents differ."""
    if isinstance(there, dict) and isinstance(now, dict):
        one, other = cast("dict[str, Any]", there), cast("dict[str, Any]", now)
        for key in dict.fromkeys((*one, *other)):
            yield from _differences(one.get(key), other.get(key), f"{name}.{key}" if name else key)
    elif isinstance(there, list) and isinstance(now, list) and len(cast("Any", there)) == len(cast("Any", now)):
        for number, pair in enumerate(zip(cast("Any", there), cast("Any", now), strict=True)):
            yield from _differences(*pair, f"{name}[{number}]")
    elif there != now:
        yield f"{name}: {there!r} there, {now!r} now"
