"""Prompts, blocks and questions that the tests of vLLM's requests have in common."""

from typing import Any

import torch

import jackfield as jf
from tests import zoo


def prompt_of(length: int, seed: int) -> list[int]:
    """Random tokens, none special."""
    drawn = torch.randint(zoo.SPECIAL_IDS, zoo.VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return drawn.tolist()


def scheduler_of(model: jf.Model) -> Any:
    """vLLM's scheduler, of an engine in this process."""
    return engine_of(model).llm.llm_engine.engine_core.engine_core.scheduler


def engine_of(model: jf.Model) -> Any:
    """The engine under a model."""
    return model._engine


def host_of(model: jf.Model) -> Any:
    """The host beside the runner, of an engine in this process."""
    return engine_of(model).llm.llm_engine.model_executor.driver_worker.worker.jackfield.host


def nothing_is_left(model: jf.Model) -> None:
    """No block, no one who waits at a site, no result that nobody asked for, no file."""
    held = dict(engine_of(model).held)
    assert held == dict.fromkeys(held, 0)
    assert not scheduler_of(model).running
    assert not engine_of(model)._driver._waiting


def close(one: Any, other: Any) -> None:
    """Two results of one block, row by row."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            close(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            close(left, right)
    else:
        assert one == other
