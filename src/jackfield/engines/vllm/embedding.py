"""What the embedding module gives: in some families transformers scales inside of it, and vLLM's models after it."""

import inspect
import sys
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING


def has_scaled_embedding(config: Any) -> bool:
    """Whether transformers' model of this configuration has an embedding module that is more than a table."""
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # untyped in transformers
    known: Any = mapping.get(type(config), None)
    if known is None:
        return False
    classes: list[tuple[str, type]] = inspect.getmembers(sys.modules[known.__module__], inspect.isclass)
    return any(issubclass(kind, nn.Embedding) and "scale" in name.lower() for name, kind in classes)
