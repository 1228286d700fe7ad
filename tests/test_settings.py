"""What the environment says."""

from pathlib import Path

import pytest

from jackfield.settings import settings

HOME = Path("/home/someone")


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({}, HOME / ".cache/jackfield"),
        ({"XDG_CACHE_HOME": "/caches"}, Path("/caches/jackfield")),
        ({"XDG_CACHE_HOME": "not/absolute"}, HOME / ".cache/jackfield"),
        ({"XDG_CACHE_HOME": ""}, HOME / ".cache/jackfield"),
        ({"XDG_CACHE_HOME": "/caches", "JACKFIELD_CACHE": "/own"}, Path("/own")),
        ({"JACKFIELD_CACHE": "~/own"}, HOME / "own"),
    ],
    ids=["nothing", "xdg", "xdg not absolute", "xdg empty", "own", "own in home"],
)
def test_the_cache_is(monkeypatch, environment, cache):
    for name in ("XDG_CACHE_HOME", "JACKFIELD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(HOME), **environment}.items():
        monkeypatch.setenv(name, value)
    assert settings().cache == cache
