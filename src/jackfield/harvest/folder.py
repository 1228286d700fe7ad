"""The folder that a harvest is written to: one writer at a time, and no file that is half there.

A shard, and the manifest after it, is written under another name, brought to the disk and renamed. A process that is
killed in between leaves the manifest as it was, and perhaps a file that it does not name, which the next one replaces.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from jackfield.errors import HarvestError
from jackfield.harvest import manifest, stored
from jackfield.harvest.manifest import Manifest
from jackfield.harvest.shard import Shard

PARTIAL: Final = ".partial"
"""What the name of a file ends in while it is written."""


class Folder:
    """A folder that is open for one harvest. Made by `opened`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def has_manifest(self) -> bool:
        """Whether a harvest was begun here. HarvestError where something else is here."""
        names = sorted(name for name in os.listdir(self.path) if not name.endswith(PARTIAL))
        if manifest.NAME not in names and names:
            raise HarvestError(
                f"{self.path} is no place for a harvest: it holds {names[0]!r} and no {manifest.NAME}. Give a folder "
                "that is empty, or not there yet."
            )
        return bool(names)

    def write(self, shard: Shard | None, after: Manifest) -> None:
        """Writes a shard, and then the manifest that names it. HarvestError where that cannot be."""
        try:
            if shard is not None:
                self._replace(after.shards[-1].file, lambda file: stored.write(file, shard.tensors))
            self._replace(manifest.NAME, lambda file: file.write(after.written().encode()))
        except OSError as error:
            raise HarvestError(
                f"{self.path} cannot be written to: {_reason(error)} What its manifest names stays; the same call "
                "goes on from there."
            ) from error

    def _replace(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        partial = self.path / (name + PARTIAL)
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path / name)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        os.fsync(self._descriptor)  # the new name, too


@contextmanager
def opened(path: Path) -> Generator[Folder]:
    """The folder, made if it is not there, and kept for this process. HarvestError where it cannot be had."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise HarvestError(f"{path} cannot be a folder to harvest into: {_reason(error)}") from None
    try:
        _lock(path, descriptor)
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)  # and with it the lock


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HarvestError(f"{path} is being harvested into by another process; wait for it, or end it.") from None
    except OSError as error:
        # File systems without locks; over NFS a folder cannot be locked (flock(2), "NFS details").
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EBADF):
            raise HarvestError(f"{path} cannot be locked: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}."
