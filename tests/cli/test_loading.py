"""What is said while a model is loaded."""

from rich.console import Console
from transformers.utils import logging

from jackfield.cli.loading import load


def test_the_spinner_says_how_far_it_is(folder, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("rich.status.Status.update", lambda self, status: said.append(status.plain))
    assert load(folder).num_layers == 4
    assert said[0] == f"loading {folder} ... 0 %"
    assert said[-1].endswith(" 97 %")
    assert logging.set_tqdm_hook(None) is None


def test_nothing_is_said_where_stderr_is_no_terminal(folder, capfd):
    assert not Console(stderr=True).is_terminal
    load(folder)
    assert tuple(capfd.readouterr()) == ("", "")
