"""Two engines in one process: vLLM's modules are the same for both, and passes are not."""

from types import SimpleNamespace
from typing import Any

import pytest

from jackfield.engines.vllm.rows import FirstRunner


@pytest.fixture
def module() -> Any:
    """A module of vLLM's, as far as it is wrapped."""
    return SimpleNamespace(set_forward_context=lambda metadata, config, **options: options)


def runner(module: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[FirstRunner, Any]:
    config = SimpleNamespace()
    dispatcher = SimpleNamespace(dispatch=lambda **_: None)
    monkeypatch.setattr("jackfield.engines.vllm.rows.import_module", lambda _: module)
    return FirstRunner(SimpleNamespace(vllm_config=config, cudagraph_dispatcher=dispatcher)), config


def test_each_answers_for_its_own_passes(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, of_first), (second, of_second) = runner(module, monkeypatch), runner(module, monkeypatch)
    first.uncompiled = True
    assert module.set_forward_context(None, of_first, skip_compiled=False) == {"skip_compiled": True}
    assert module.set_forward_context(None, of_second, skip_compiled=False) == {"skip_compiled": False}
    assert module.set_forward_context(None, SimpleNamespace(), num_tokens=3) == {"num_tokens": 3}  # of a plain vLLM
    second.uncompiled = True
    assert module.set_forward_context(None, of_second) == {"skip_compiled": True}


def test_one_that_is_closed_takes_nothing_from_the_other(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module.set_forward_context
    (first, of_first), (second, of_second) = runner(module, monkeypatch), runner(module, monkeypatch)
    first.uncompiled = second.uncompiled = True
    first.close()
    assert module.set_forward_context(None, of_first) == {}
    assert module.set_forward_context(None, of_second) == {"skip_compiled": True}
    second.close()
    assert module.set_forward_context is plain
