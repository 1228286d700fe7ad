"""What a worker answers to its client: bytes, and the memory of large tensors apart from them, which nobody copies.

Large memory stands in an anonymous file, which the client opens through the worker's process and maps. It has no name
that could be left behind: it is gone when the client has mapped it and said so, or when the worker ends.
"""

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jackfield.engines.vllm.companion import Fate
from jackfield.engines.vllm.shipping import Ends, dumps, dumps_data, loads
from jackfield.errors import TracingError

LARGE_BYTES: Final = 2**20
"""From where on an answer's tensors stand in memory of their own."""


@dataclass(frozen=True, slots=True)
class Lent:
    """An anonymous file of another process on this machine, and where the buffers in it are: (start, end) in bytes."""

    process_id: int
    descriptor: int
    places: tuple[tuple[int, int], ...]

    def mapped(self) -> list[memoryview]:
        """Its buffers, private and writable. OSError where this process cannot see that one's files."""
        with open(f"/proc/{self.process_id}/fd/{self.descriptor}", "rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return [view[start:end] for start, end in self.places]


class Lender:
    """The worker's side: the files that its client has not released."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def lend(self, buffers: Sequence[memoryview]) -> Lent:
        """The buffers in an anonymous file, each beginning where a tensor of any dtype may begin."""
        descriptor = os.memfd_create("jackfield")
        self._open.add(descriptor)
        places = [_write(descriptor, buffer) for buffer in buffers]
        return Lent(os.getpid(), descriptor, tuple(places))

    def release(self, descriptors: Sequence[int]) -> None:
        """The client has mapped these files."""
        for descriptor in self._open & set(descriptors):
            self._open.remove(descriptor)
            os.close(descriptor)

    def answer(self, value: Any, ends: Ends, *, lending: bool) -> bytes:
        """A value as bytes, its tensors apart where they are large and the client can map this process's files."""
        buffers: list[memoryview] = []
        keep: Callable[[pickle.PickleBuffer], None] = lambda buffer: buffers.append(buffer.raw())  # noqa: E731
        is_data = isinstance(value, Fate) and value.is_data
        data = dumps_data(value, keep) if is_data else dumps(value, ends, keep)
        large = sum(buffer.nbytes for buffer in buffers) >= LARGE_BYTES
        apart = self.lend(buffers) if lending and large else [bytearray(buffer) for buffer in buffers]
        return pickle.dumps((data, apart))


def heard(answer: bytes, ends: Ends, release: Callable[[int], None]) -> Any:
    """The value of an answer. `release` is told which file has been mapped."""
    data, apart = pickle.loads(answer)
    if isinstance(apart, Lent):
        buffers: Sequence[Any] = apart.mapped()
        release(apart.descriptor)
        return loads(data, ends, buffers)
    return loads(data, ends, apart)


PROOF: Final = b"jackfield's anonymous file"
ALIGNMENT_BYTES: Final = 64


def unsendable(fate: Fate, why: Exception) -> TracingError:
    """What a caller is told of a block whose results, or error, cannot be pickled."""
    if fate.error is not None:
        return TracingError(f"The block raised {type(fate.error).__name__}: {fate.error}")
    names = ", ".join(fate.saved) or "nothing"
    return TracingError(
        f"What the block saved ({names}) or returned cannot be sent from vLLM's workers: {why}. Save plain data."
    )


def can_map(proof: Lent | None) -> bool:
    """Whether this process sees the files of the one that lends `proof`: on this machine, for this user."""
    if proof is None:
        return False
    try:
        return bytes(proof.mapped()[0]) == PROOF
    except (OSError, ValueError):
        return False


def _write(descriptor: int, buffer: memoryview) -> tuple[int, int]:
    start = -(-os.lseek(descriptor, 0, os.SEEK_END) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    written = 0
    while written < buffer.nbytes:
        written += os.pwrite(descriptor, buffer[written:], start + written)
    return start, start + written
