"""Loading a causal language model and its tokenizer, by hub name, out of a folder, or as handed over.

A model that would load and then compute something else is refused: heads that the checkpoint does not hold (they
would be random), models that read in both directions, encoder-decoders. transformers' own exceptions end here.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.hub import cached_file  # pyright: ignore[reportUnknownVariableType]  # untyped **kwargs

from jackfield.engines.request import Limits
from jackfield.engines.transformers.progress_bars import late_progress_bars
from jackfield.engines.weight_files import unreadable
from jackfield.errors import EngineError, InvalidRequest, UnknownModel, UnsupportedModel, near

Loaded: TypeAlias = tuple[PreTrainedModel, PreTrainedTokenizerBase | None]

# Options that say where files are, and so go to the configuration and the tokenizer too.
WHERE: Final = frozenset(
    {
        "cache_dir",
        "force_download",
        "gguf_file",
        "local_files_only",
        "proxies",
        "revision",
        "subfolder",
        "token",
        "trust_remote_code",
    }
)
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
)
CONTEXT_SETTINGS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def load(
    model: Any,  # parsed here: a name, a folder or a PreTrainedModel
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | bool | None = None,
    **options: Any,
) -> Loaded:
    """The model, in eval mode, and its tokenizer, None where it came without one.

    `dtype` is the checkpoint's own unless given, `device` the first GPU if there is one; `options` are
    `from_pretrained`'s. `tokenizer` is one to use, its name or folder, or False for none. A model that is handed over
    stays where, and as, it is, but for eval mode. UnknownModel where nothing loads under that name, UnsupportedModel
    where what loads cannot be served, InvalidRequest for a dtype, device or option that is none.
    """
    if isinstance(model, PreTrainedModel):
        return _adopted(model, dtype, device, tokenizer, options)
    if not isinstance(model, str | Path):
        raise UnknownModel(
            f"A {type(model).__name__} is no model to load: give a hub name, a folder or a loaded PreTrainedModel."
        )
    name = str(model)
    options = {"trust_remote_code": False, **options}  # else transformers asks, on the terminal
    where = {option: value for option, value in options.items() if option in WHERE}
    config = _config(name, where)
    _check_architecture(name, config, bool(options["trust_remote_code"]))
    target = None if "device_map" in options else parse_device(device)
    if target is None and device is not None:
        raise InvalidRequest(f"device={device!r} and device_map both say where the model goes: leave one out.")
    loaded = _weights(name, config, parse_dtype(dtype), options)
    if target is not None:
        loaded = loaded.to(target)  # pyright: ignore[reportArgumentType]  # annotated for a decorator
    _check_cache(name, loaded)
    _check_direction(name, loaded.eval())
    return loaded, load_tokenizer(name if tokenizer is None else tokenizer, where)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """A floating dtype of torch, or "auto", the checkpoint's, for None; InvalidRequest for anything else."""
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        hint = near(str(dtype), ("float32", "bfloat16", "float16", "auto"))
        raise InvalidRequest(f"dtype={dtype!r} is no floating dtype of torch, such as 'bfloat16'.{hint}")
    return found


def parse_device(device: torch.device | str | None) -> torch.device:
    """A device that is there; for None the first GPU, or the CPU without one. InvalidRequest for anything else."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(1, device=found).item()  # a meta tensor has no number
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidRequest(f"device={device!r} cannot be used: {_first_line(error)}") from None
    return found


def limits(config: PretrainedConfig) -> Limits:
    """What prompts have to keep to: the vocabulary and, where positions end, the context.

    Models without one (ALiBi computed on the spot, recurrent ones) have no setting for it. mpt builds its bias for
    `max_seq_len` positions and has none beyond.
    """
    text = config.get_text_config()
    for name in CONTEXT_SETTINGS:
        context = getattr(text, name, None)
        if isinstance(context, int) and context > 0:
            return Limits(text.vocab_size, context, f"{name} of its configuration")
    return Limits(text.vocab_size, None, "")


def _adopted(
    model: PreTrainedModel, dtype: object, device: object, tokenizer: object, options: Mapping[str, Any]
) -> Loaded:
    given = {"dtype": dtype, "device": device, **options}
    asked = [name for name, value in given.items() if value is not None]
    if asked:
        raise InvalidRequest(
            f"{', '.join(asked)}: the model is loaded already; say it to from_pretrained, or model.to()."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder; only decoders are served.")
    if not model.can_generate():
        raise UnsupportedModel(f"{type(model).__name__} has no language modelling head: load AutoModelForCausalLM.")
    _check_cache(type(model).__name__, model)
    _check_direction(type(model).__name__, model.eval())
    name = cast("str", model.config.name_or_path)
    return model.eval(), load_tokenizer(
        (name or False) if tokenizer is None else tokenizer, {"trust_remote_code": False}
    )


def _config(name: str, where: Mapping[str, Any]) -> PretrainedConfig:
    folder = Path(name, where.get("subfolder", ""))
    if folder.is_dir() and not (folder / "config.json").is_file() and "gguf_file" not in where:
        raise UnknownModel(f"{name!r}: that folder holds no model: there is no config.json in it.")
    try:
        return cast("PretrainedConfig", AutoConfig.from_pretrained(name, **where))
    except Exception as error:  # each version checks it with errors of its own
        if isinstance(error, OSError) and not folder.is_dir():
            raise UnknownModel(
                f"{name!r}: there is no such folder here, and as a hub name: {_first_line(error)}"
            ) from error
        raise UnsupportedModel(f"{name!r}: transformers cannot read its configuration: {_first_line(error)}") from error


def _check_architecture(name: str, config: PretrainedConfig, trusted: bool) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name!r} ({kind}) is an encoder-decoder; only decoders are served.")
    saved_as = " ".join(getattr(config, "architectures", None) or ())
    if getattr(config, "is_decoder", None) is False and "CausalLM" not in saved_as:
        raise UnsupportedModel(f"{name!r} ({kind}) reads in both directions; only causal models are served.")
    own_code = trusted and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UnsupportedModel(f"{name!r} ({kind}) is no causal language model to transformers.")


def _check_cache(name: str, model: PreTrainedModel) -> None:
    """Refuses a configuration that `generate` could make no cache of: it counts its layers by their standard name."""
    if not cast("Any", type(model))._supports_default_dynamic_cache():  # of GenerationMixin: the model brings its own
        return
    text = model.config.get_text_config(decoder=True)
    try:
        DynamicCache(config=text)
    except AttributeError as error:
        raise UnsupportedModel(
            f"{name!r}: transformers makes its cache out of the configuration and looked for num_hidden_layers, which "
            f"{type(text).__name__} should have, or name in its attribute_map: {_first_line(error)}."
        ) from error


@torch.no_grad()
def _check_direction(name: str, model: PreTrainedModel) -> None:
    """Refuses a model whose tokens see what follows, as BERT's do unless its configuration says `is_decoder`."""
    if getattr(model.config, "is_decoder", None) is not False:
        return
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]], device=model.device) % vocabulary
    one, other = model(input_ids=ids, use_cache=False).logits[:, 0].float()
    if not torch.allclose(one, other, atol=1e-3 * float(one.abs().max())):
        raise UnsupportedModel(f"{name!r} reads in both directions; only causal models are served.")


def _weights(
    name: str, config: PretrainedConfig, dtype: torch.dtype | str, options: Mapping[str, Any]
) -> PreTrainedModel:
    settings = {"ignore_mismatched_sizes": True, **options}  # which are refused here, by name and shapes
    try:
        # from_pretrained's result is annotated without output_loading_info's second part.
        with late_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=dtype, output_loading_info=True, **settings
            )
    except Exception as error:  # each format has errors of its own
        raise _not_loaded(name, Path(name, options.get("subfolder", "")), error) from error
    model, info = cast("tuple[PreTrainedModel, dict[str, set[Any]]]", loaded)
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(
            f"{name!r}: the checkpoint lacks {_listed(missing)}, which would be random. Is it a language model?"
        )
    if not options.get("ignore_mismatched_sizes"):
        _check_shapes(name, info["mismatched_keys"])
    return model


def _not_loaded(name: str, folder: Path, error: Exception) -> EngineError:
    broken = None
    if isinstance(error, OSError | SafetensorError):
        broken = _first_line(error)
    elif folder.is_dir():
        broken = unreadable(folder)
    if broken is not None:
        return UnknownModel(f"{name!r}: its weights cannot be read: {broken}")
    return UnsupportedModel(f"{name!r}: transformers cannot load it: {_first_line(error)}")


def _check_shapes(name: str, mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> None:
    misfits = [f"{key} is {tuple(has)} and not {tuple(wants)}" for key, has, wants in sorted(mismatched)]
    if misfits:
        raise UnsupportedModel(f"{name!r}: weights do not have the shapes of its configuration: {_listed(misfits)}.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_tokenizer(source: object, where: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """A tokenizer: the one handed over, or that of a name or folder; None for False, or where there is none.

    `where` are options of `from_pretrained`. UnsupportedModel for one that is there and cannot be loaded.
    """
    if source is False:
        return None
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    name = str(source)
    try:
        tokenizer = cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(name, **where))
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        if not _hasload_tokenizer(name, where):
            return None
        raise UnsupportedModel(
            f"{name!r}: its tokenizer cannot be loaded: {_first_line(error)} "
            "Pass tokenizer=False to give token ids alone."
        ) from error
    # Without any file transformers makes an empty one for some families.
    return tokenizer if tokenizer.vocab_size > 0 else None


def _hasload_tokenizer(name: str, where: Mapping[str, Any]) -> bool:
    options = {option: value for option, value in where.items() if option not in ("gguf_file", "trust_remote_code")}
    return "gguf_file" in where or any(has_file(name, file, options) for file in TOKENIZER_FILES)


def has_file(name: str, file: str, options: Mapping[str, Any]) -> bool:
    """Whether a folder, or the repository of that name, has such a file; `options` say where, as WHERE has them."""
    try:
        return cached_file(name, file, **options) is not None
    except OSError:
        return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
