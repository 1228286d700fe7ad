"""What lies between a block and its greenlet's base."""

import ctypes
import sys
from typing import Any

import pytest

from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker

TORCH_LOOKS_AT = 64 + 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's backtrace")
def test_no_walk_of_torchs_comes_to_the_base_of_a_greenlet() -> None:
    found: list[Any] = []

    def block() -> None:
        addresses = (ctypes.c_void_p * TORCH_LOOKS_AT)()
        count = ctypes.CDLL(None).backtrace(addresses, TORCH_LOOKS_AT)
        found.extend(list(addresses)[:count])

    worker = Worker(Rows(0, 0, 1))
    worker.body = block
    worker.resume(None)
    assert worker.error is None
    assert len(found) == TORCH_LOOKS_AT
    assert len(set(found[-12:])) == 1  # one level after another, to the end of the walk
