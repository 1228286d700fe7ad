"""An environment for each library that is compared, made when it is first needed."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.jobs import LIBRARIES

ROOT = Path(__file__).parent.parent
REQUIREMENTS = {
    "nnsight": ("nnsight==0.8.1", "transformers==5.19.0"),
    "TransformerLens": ("transformer-lens==4.3.0",),
}


@dataclass(frozen=True, slots=True)
class Environment:
    """A library and the Python that has it."""

    library: str
    python: Path


def environments(libraries: Sequence[str] = LIBRARIES) -> list[Environment]:
    """jackfield's is the one that runs this; the others are made in bench/, in some minutes, if they are not there."""
    return [Environment(library, _python(library)) for library in libraries]


def _python(library: str) -> Path:
    if library not in REQUIREMENTS:
        return Path(sys.executable)
    folder = ROOT / "bench" / f".venv-{library.lower()}"
    python, done = folder / "bin" / "python", folder / ".made"
    wanted = "\n".join(REQUIREMENTS[library])
    if not done.exists() or done.read_text() != wanted:
        _make(library, folder, python)
        done.write_text(wanted)
    return python


def _make(library: str, folder: Path, python: Path) -> None:
    """torch as jackfield has it (the same constraint); each library's other requirements are its own affair."""
    print(f"making an environment for {library} in {folder.relative_to(ROOT)}", file=sys.stderr)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip, torch, *REQUIREMENTS[library]], check=True)
