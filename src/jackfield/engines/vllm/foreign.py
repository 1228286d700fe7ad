"""vLLM's own objects, taken by name: this package is imported where vLLM is not, and typed alike in both cases.

What is derived from one of them, or bound to one, is `Any`: there are nine versions of vLLM's types.
"""

from importlib import import_module
from typing import Any


def foreign(module: str, name: str) -> Any:
    """An object of one of vLLM's modules; its types are vLLM's own business."""
    return getattr(import_module(module), name)


def inherited(base: object) -> Any:
    """What `super()` is in a class that is derived from one of vLLM's: `Any`, and not unknown."""
    return base
