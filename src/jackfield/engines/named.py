"""Engines by their names."""

from collections.abc import Mapping
from typing import Any, Final

from jackfield.engines.engine import Engine
from jackfield.errors import InvalidRequest, near

ENGINES: Final = ("transformers", "vllm", "llama")


def engine_named(name: str, model: Any, dtype: Any, device: Any, family: Any, options: Mapping[str, Any]) -> Engine:
    """The engine of this name, with a model loaded. Only it is imported: not everybody has all of them installed.

    InvalidRequest for a name that none has, and what the engine itself refuses.
    """
    if name == "transformers":
        from jackfield.engines.transformers.engine import TransformersEngine

        return TransformersEngine(model, dtype=dtype, device=device, family=family, **options)
    if name == "llama":
        from jackfield.engines.llama.engine import LlamaEngine

        if family is not None:
            raise InvalidRequest("family: the llama engine is one family; leave it out.")
        return LlamaEngine(model, dtype=dtype, device=device, **options)
    if name == "vllm":
        from jackfield.engines.vllm.engine import VllmEngine

        return VllmEngine(model, dtype=dtype, device=device, family=family, **options)
    raise InvalidRequest(f"There is no engine {name!r}; engines are {', '.join(ENGINES)}.{near(str(name), ENGINES)}")
