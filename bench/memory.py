"""How much memory a case takes at its peak, and how much what it gives back keeps.

Linux keeps the peak of a process's resident memory, and starts it anew when asked to (proc(5), /proc/pid/clear_refs).
The process runs with glibc's threshold fixed (see `turns`): large blocks go back to the system when they are freed.
"""

import ctypes
import gc
import re
from pathlib import Path

from bench.jobs import Case

PROCESS = Path("/proc/self")


def measured(case: Case) -> dict[str, int]:
    """Bytes above what the process holds between two runs of the case, of which the first is not measured."""
    case()
    _settle()
    before = resident("VmRSS")
    (PROCESS / "clear_refs").write_text("5")
    read = case()
    peak = resident("VmHWM")
    _settle()
    kept = resident("VmRSS")
    del read
    return {"peak_bytes": peak - before, "kept_bytes": kept - before}


def resident(field: str) -> int:
    """A field of /proc/self/status that is in kB, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", (PROCESS / "status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def _settle() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
