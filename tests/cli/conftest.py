"""A tiny model in a folder, and the command line in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from jackfield.cli import main
from tests import zoo
from tests.engines.tiny_tokenizers import words


@dataclass(frozen=True)
class Said:
    """What one call of the command wrote, and its exit status."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A heated llama of four layers, with a tokenizer of whole words."""
    path = tmp_path_factory.mktemp("llama")
    zoo.build("llama", attn="sdpa").save_pretrained(path)
    words().save_pretrained(path)
    return str(path)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Said]:
    """Runs `jackfield` with these arguments in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr("sys.argv", ["jackfield", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Said(ended.value.code or 0, *capsys.readouterr())

    return run
