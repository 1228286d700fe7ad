"""Why vLLM has not started: whose fault it was, told from options and files and never from vLLM's words.

vLLM raises many errors for a model, and where it has processes of its own, one for all of them.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from jackfield.engines.transformers.loading import has_file
from jackfield.engines.vllm.foreign import foreign
from jackfield.engines.weight_files import unreadable
from jackfield.errors import EngineError, InvalidRequest, UnknownModel, UnsupportedModel, near

CONFIGURATIONS: Final = ("config.json", "params.json")


def refusal(model: str, options: Mapping[str, Any], error: Exception) -> EngineError:
    """InvalidRequest for an option that is none, or whose value has another type or is out of its range.

    UnknownModel where nothing is there under that name, or a file of weights is missing or broken. UnsupportedModel
    otherwise: an option that vLLM refuses together with the model, or by an error without the option's name, too.
    """
    if (refused := _refused(options, error)) is not None:
        return InvalidRequest(refused)
    if (missing := _missing(model, options)) is not None:
        return UnknownModel(f"{model!r}: {missing}.")
    return UnsupportedModel(f"vLLM could not load {model}: {str(error) or type(error).__name__}")


def _refused(options: Mapping[str, Any], error: Any) -> str | None:
    """The option that is to blame, where the error is about one."""
    if isinstance(error, TypeError) and (unknown := sorted(options.keys() - _known())):
        return f"{', '.join(unknown)}: vLLM has no such option.{near(unknown[0], _known())}"
    for name, message in _blamed(error):
        if name in options:
            return f"{name}={options[name]!r}: vLLM does not take this: {message}."
    return None


def _blamed(error: Any) -> Iterator[tuple[str, str]]:
    """The fields of vLLM's configuration that pydantic refuses one by one, and why; a whole one has no name there."""
    if isinstance(error, foreign("pydantic", "ValidationError")):
        yield from ((each["loc"][0], each["msg"]) for each in error.errors() if each["loc"])


def _known() -> Iterable[str]:
    """The options of `vllm.LLM`, which hands on what is not its own."""
    fields = dataclasses.fields(foreign("vllm.engine.arg_utils", "EngineArgs"))
    return {field.name for field in fields} | inspect.signature(foreign("vllm", "LLM").__init__).parameters.keys()


def _missing(model: str, options: Mapping[str, Any]) -> str | None:
    """What is not there of a model in transformers' layout or Mistral's; None where all is, and for other sources."""
    folder, where = Path(model), {name: options[name] for name in ("revision",) if options.get(name)}
    if folder.is_dir():
        if "hf_config_path" not in options and not any((folder / name).is_file() for name in CONFIGURATIONS):
            return f"that folder holds no model: there is no {' or '.join(CONFIGURATIONS)} in it"
        broken = unreadable(folder) if options.get("load_format", "auto") == "auto" else None
        return broken and f"its weights cannot be read: {broken}"
    if folder.exists() or "://" in model or any(has_file(model, name, where) for name in CONFIGURATIONS):
        return None
    return "there is no such folder here, and no such model under that name on the hub, or the hub cannot be reached"
