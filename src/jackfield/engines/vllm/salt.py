"""Keeps vLLM's cache of compiled code apart: code that holds our taps is not taken for code without, or with others.

A server that is started without jackfield, after one with it, would otherwise load code that calls what it has not got.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def salted(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """An `additional_config` of vLLM's, which names the code that it compiles, with what names our taps."""
    texts = [Path(__file__).with_name(name).read_bytes() for name in ("taps.py", "structure.py")]
    return {**additional_config, "jackfield": hashlib.sha256(b"".join(texts)).hexdigest()[:16]}
