"""What is wrong with the files of weights in a folder, asked after a model could not be loaded.

Libraries say it by many exceptions, which do not cross processes, and each of them may mean something else as well.
"""

import json
import zipfile
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open  # pyright: ignore[reportUnknownVariableType]  # of compiled code

ENDINGS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
OF_TRAINING: Final = ("training_args", "optimizer", "scheduler", "scaler")  # which lie beside weights, and hold none


def unreadable(folder: Path) -> str | None:
    """Why the weights in a folder cannot be read: there are none, or a file is broken. None where they can be."""
    files = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS and path.stem not in OF_TRAINING)
    if not files:
        return f"it holds no weights ({', '.join(f'*{ending}' for ending in ENDINGS)})"
    preferred = [path for path in files if path.suffix == ".safetensors"]  # as everywhere
    for path in (*sorted(folder.glob("*.index.json")), *(preferred or files)):
        try:
            _read(path)
        except Exception as error:  # each format has errors of its own
            return f"{path.name} is broken: {str(error).strip().split(chr(10))[0] or type(error).__name__}"
    return None


def _read(path: Path) -> None:
    """Reads as much of a file as says that it is whole."""
    if path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".safetensors":
        with safe_open(path, "pt"):
            pass
    elif path.suffix != ".gguf":  # torch's older format is no archive, and cannot be mapped
        torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
