"""Bars of transformers: late, and only where nobody shows them in another way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from jackfield.engines.transformers import progress_bars
from jackfield.engines.transformers.loading import load
from jackfield.engines.transformers.progress_bars import late_progress_bars
from tests import zoo


@pytest.fixture(autouse=True)
def bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    yield
    logging.set_tqdm_hook(None)
    if not shown:
        logging.disable_progress_bar()


def hook() -> Any:
    """The hook that is set."""
    found = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(found)
    return found


def test_a_model_that_is_there_at_once_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    capfd.readouterr()
    load(tmp_path, device="cpu")
    assert tuple(capfd.readouterr()) == ("", "")
    monkeypatch.setattr(progress_bars, "PATIENCE_S", 0.0)
    load(tmp_path, device="cpu")
    assert "Loading weights" in capfd.readouterr().err
    assert hook() is None


def test_a_hook_of_somebody_else_stays() -> None:
    def theirs(bar: Any, args: Any, kwargs: Any) -> str:
        return "theirs"

    logging.set_tqdm_hook(theirs)
    with late_progress_bars():
        assert logging.tqdm([1]) == "theirs"
    assert hook() is theirs


def test_one_inside_another_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError), late_progress_bars(), late_progress_bars():
        raise KeyError
    assert hook() is None


def test_bars_that_are_off_stay_off(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "PATIENCE_S", 0.0)
    logging.disable_progress_bar()
    with late_progress_bars():
        assert list(logging.tqdm([1, 2])) == [1, 2]
    assert tuple(capfd.readouterr()) == ("", "")
