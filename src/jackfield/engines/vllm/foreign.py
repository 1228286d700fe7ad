"""vLLM's own objects, taken by name when they are needed: this package is imported, and typed, where vLLM is not."""

from importlib import import_module
from typing import Any


def foreign(module: str, name: str) -> Any:
    """An object of one of vLLM's modules; its types are vLLM's own business."""
    return getattr(import_module(module), name)
