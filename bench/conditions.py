"""What a run was measured on."""

import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from bench.environments import ROOT
from bench.jobs import LONG_TOKENS, NEW_TOKENS, OVERHEAD_LAYERS, OVERHEAD_TOKENS, OVERHEAD_WIDTH, PROMPT_TOKENS
from bench.turns import Seconds


def conditions(
    seconds: Seconds, versions: Mapping[str, Mapping[str, str]], *, threads: int, rounds: int, took_s: float
) -> dict[str, str]:
    """One line for each thing that the numbers depend on. `took_s` is how long the run took."""
    counts = {job: len(times) for job, timed in seconds.items() for cases in timed.values() for times in cases.values()}
    repeats = ", ".join(f"{job} {count}" for job, count in counts.items())
    return {
        "date": f"{date.today():%Y-%m-%d}; the run took {took_s / 60:.0f} minutes",
        "processor": f"{processor()}, {os.cpu_count()} cores; {threads} threads",
        "system": f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "jackfield": jackfield(),
        **{f"{library}'s process": _listed(found) for library, found in versions.items()},
        "sample model": f"SmolLM2-135M-Instruct, float32; {NEW_TOKENS} greedy tokens after a prompt of 9, "
        f"or a prompt of {PROMPT_TOKENS} tokens; memory with {LONG_TOKENS:,} too",
        "thin model": f"a Llama of random weights, {OVERHEAD_LAYERS} layers, width {OVERHEAD_WIDTH}, 4 heads, "
        f"a vocabulary of 256, float32; a prompt of {OVERHEAD_TOKENS} tokens",
        "times": f"medians (quartiles) of so many: {repeats}; in {rounds} turns of each process",
    }


def jackfield(root: Path = ROOT) -> str:
    """The version and commit that lie here."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return f"{version}, commit {commit}" if commit else version


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as Linux has it."""
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())
