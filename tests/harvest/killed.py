"""A harvest that kills its own process in the middle: `python -m tests.harvest.killed FOLDER WHERE`."""

import os
import signal
import sys
from typing import Any

import jackfield as jf
from jackfield.engines.fake import FakeEngine
from jackfield.harvest import stored
from jackfield.harvest.folder import Folder
from tests.harvest.prompts import prompts

COUNT = 60
CAPTURES = [jf.Capture("layers.*.layer_output"), jf.Capture("layers.0.mlp_output")]
OPTIONS: dict[str, Any] = {"shard_prompts": 7}


def model() -> jf.Model:
    return jf.Model.over(FakeEngine(max_num_seqs=4))


def given() -> list[list[int]]:
    """Some of them cannot be run."""
    return [[*ids, 99] if number % 10 == 4 else ids for number, ids in enumerate(prompts(COUNT))]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def between_prompts() -> Any:
    """When prompt 31 is drawn."""
    for number, ids in enumerate(given()):
        if number == 31:
            kill()
        yield ids


def in_the_middle_of_a_file() -> None:
    """Of the third shard a part is written."""
    write, files = stored.write, list[str]()

    def cut(file: Any, tensors: Any) -> None:
        files.append(file.name)
        if len(files) == 3:
            file.write(b"part of it")
            file.flush()
            kill()
        write(file, tensors)

    stored.write = cut


def before_the_manifest() -> None:
    """The third shard is whole, and not named yet."""
    replace = Folder._replace

    def cut(self: Folder, name: str, write: Any) -> None:
        if name == "manifest.json" and (self.path / "harvest-00002.safetensors").exists():
            kill()
        replace(self, name, write)

    Folder._replace = cut


if __name__ == "__main__":
    _, folder, where = sys.argv
    if where != "between prompts":
        {"in a file": in_the_middle_of_a_file, "before the manifest": before_the_manifest}[where]()
    stream = between_prompts() if where == "between prompts" else iter(given())
    model().harvest(stream, folder, CAPTURES, **OPTIONS)
