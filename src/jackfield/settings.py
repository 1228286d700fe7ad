"""What the environment says: the only place that reads it.

| variable | meaning |
|---|---|
| `JACKFIELD_CACHE` | the folder for what jackfield makes once and keeps |
| `XDG_CACHE_HOME` | the folder of all caches, where `JACKFIELD_CACHE` is not set |
| `WORLD_SIZE` | how many processes `torchrun` has started, of which this is one |
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of this process. `cache` need not exist yet; `world_size` is 1 outside `torchrun`."""

    cache: Path
    world_size: int = 1


def settings() -> Settings:
    """Read the environment as it is now."""
    size = os.environ.get("WORLD_SIZE", "1")
    return Settings(cache=_cache(), world_size=int(size) if size.isdecimal() else 1)


def _cache() -> Path:
    own = os.environ.get("JACKFIELD_CACHE")
    if own:
        return Path(own).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    # The XDG base directory specification says to ignore a path that is not absolute.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "jackfield"
