"""A checkpoint's folder and what lies beside its weights, for engines that read weights themselves.

By hub name it is fetched, as transformers would. Not for weights: an engine knows its own layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # an untyped progress bar
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from jackfield.engines.prompt import Tokenizer
from jackfield.engines.transformers.loading import load_tokenizer
from jackfield.errors import InvalidRequest, UnknownModel, UnsupportedModel, near

FILES: Final = ("*.json", "*.jinja", "*.safetensors", "tokenizer*", "params.json", "consolidated.*.pth")
WHERE: Final = ("cache_dir", "force_download", "local_files_only", "revision", "token")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folder, and what is in it beside weights. `config` is None in Meta's layout, which has no such file."""

    folder: Path
    config: PretrainedConfig | None
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]

    @property
    def context(self) -> int | None:
        """How many positions the model was made for, where it says so."""
        return getattr(self.config, "max_position_embeddings", None)


def snapshot(model: Any, tokenizer: Any, where: Mapping[str, Any], options: Sequence[str]) -> Snapshot:
    """What there is of a folder or a hub name; `options` are the engine's own, for messages.

    UnknownModel where there is neither, UnsupportedModel for a configuration or tokenizer that cannot be read,
    InvalidRequest for an option that is none.
    """
    for option in where:
        if option not in WHERE:
            raise InvalidRequest(f"{option} is no option of this engine.{near(option, (*options, *WHERE))}")
    if not isinstance(model, str | Path):
        raise UnknownModel(f"A {type(model).__name__} is no model to load: give a hub name or a folder.")
    folder = Path(model) if Path(model).is_dir() else _fetched(str(model), where)
    config = _config(folder)
    words = load_tokenizer(str(folder) if tokenizer is None else tokenizer, {"trust_remote_code": False})
    return Snapshot(folder, config, cast("Tokenizer | None", words), _eos_ids(folder, config, words))


def _fetched(name: str, where: Mapping[str, Any]) -> Path:
    try:
        return Path(cast("str", snapshot_download(name, allow_patterns=list(FILES), **where)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnknownModel(f"{name!r}: there is no such folder here, and as a hub name: {reason}") from error


def _config(folder: Path) -> PretrainedConfig | None:
    if not (folder / "config.json").is_file():
        return None
    try:
        return cast("PretrainedConfig", AutoConfig.from_pretrained(folder))
    except Exception as error:  # each version checks it with errors of its own
        raise UnsupportedModel(f"{folder}: transformers cannot read its configuration: {error}") from error


def _eos_ids(folder: Path, config: PretrainedConfig | None, tokenizer: object) -> frozenset[int]:
    """The ids that end a sequence: the model's, one or several, and the tokenizer's."""
    says = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else config
    stated: int | list[int] | None = getattr(says, "eos_token_id", None)
    also: int | None = getattr(tokenizer, "eos_token_id", None)
    return frozenset(i for i in (*(stated if isinstance(stated, list) else [stated]), also) if i is not None)
