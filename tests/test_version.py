"""Which jackfield this is, installed or not."""

from importlib import metadata
from typing import NoReturn

import pytest

import jackfield as jf
from jackfield import version


def test_the_version_is_the_installed_packages() -> None:
    assert jf.__version__ == metadata.version("jackfield")


def test_a_source_that_is_not_installed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a harvest from a source tree on PYTHONPATH, as `make bench-gpu` runs it, that raised an error."""

    def missing(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version.installed() == "unknown"
