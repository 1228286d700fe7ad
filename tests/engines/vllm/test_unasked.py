"""vLLM's own engines where jackfield is installed, and engines that were given its worker by hand."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import jackfield as jf
from jackfield.engines.vllm import versions
from jackfield.engines.vllm.shipping import KEY, shipped
from tests import zoo
from tests.engines.vllm import tiny, unasked

pytestmark = pytest.mark.slow

FORGED = ("a block", 5, ["name", "block"], ["name", "block", "more"], [b"name", b"block"], [], {"name": b"block"})
"""What may come over HTTP as `vllm_xargs`, and worse: bytes under a name are all that is a block."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.need_vllm()
    folder = tmp_path_factory.mktemp("model")
    zoo.build("llama", head_dim=32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> Any:
    """By a process that nobody asked jackfield into, though it could import it."""
    source = str(Path(jf.__file__).parents[1])
    environment = {**os.environ, **tiny.ENVIRONMENT, "PYTHONPATH": source}
    command = [sys.executable, unasked.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_vllm_alone_imports_nothing_of_jackfield(said: Any) -> None:
    """Its workers are told our classes by name, where a jf.Model asks for them: there is no plugin to load."""
    assert said["plugins"], "vLLM has plugins of its own, so that this looks where they are"
    assert not [plugin for plugin in said["plugins"] if "jackfield" in plugin]
    assert said["modules"] == []
    assert said["additional"] == {}


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> Iterator[Any]:
    """As `vllm serve --worker-cls ... --scheduler-cls ...` starts one, with nobody to send it blocks."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in tiny.ENVIRONMENT.items():
            patched.setenv(name, value)
        llm = unasked.started(
            str(folder),
            worker_cls="jackfield.vllm_worker.Worker",
            scheduler_cls="jackfield.engines.vllm.scheduler.scheduler",
        )
        with closing(types.SimpleNamespace(close=llm.llm_engine.engine_core.shutdown)):
            yield llm


def test_traffic_through_our_worker_is_answered_alike(by_hand: Any, said: Any) -> None:
    assert unasked.answers(by_hand) == said["tokens"]


def test_compiled_code_with_taps_has_a_name_of_its_own(by_hand: Any, said: Any) -> None:
    """Kills: a server without jackfield that loads code which calls our taps."""
    config = by_hand.llm_engine.vllm_config
    salted, additional = config.compute_hash(), config.additional_config
    assert set(additional) == {KEY}
    config.additional_config = said["additional"]
    try:
        assert config.compute_hash() != salted
    finally:
        config.additional_config = additional


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_what_a_stranger_sends_is_never_unpickled(by_hand: Any, said: Any, forged: Any) -> None:
    """Kills: an engine that dies of a request, or runs what it brings."""
    params = types.SimpleNamespace(extra_args={KEY: forged})
    assert shipped(params) is None
    assert unasked.answers(by_hand, extra_args={KEY: forged}) == said["tokens"]


def test_bytes_under_a_name_are_a_block() -> None:
    assert shipped(types.SimpleNamespace(extra_args={KEY: ["name", b"block"]})) == ("name", b"block")
    assert shipped(types.SimpleNamespace(extra_args=None)) is None
    assert shipped(None) is None


@pytest.mark.parametrize("found", ["0.24.9", "0.34.0", "1.0"])
def test_other_versions_are_refused_with_those_that_were_tried(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: found)
    with pytest.raises(jf.UnsupportedVersion, match=rf"vLLM {found} was found.* 0\.25 to 0\.33 and run on 0\.25\.1"):
        versions.check_version()


@pytest.mark.parametrize("found", ["0.25.0", "0.33.1.dev3+cpu"])
def test_versions_between_are_not(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: found)
    versions.check_version()
