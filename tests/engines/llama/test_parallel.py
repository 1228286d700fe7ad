"""Two ranks on CPUs, over gloo, against one."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any  # what a rank found

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from jackfield.engines.llama.checkpoint import load
from jackfield.engines.llama.layers import Attention, ModelArgs, Transformer
from jackfield.engines.llama.parallel import RowParallelLinear
from jackfield.errors import Unavailable, UnsupportedModel
from tests.engines.llama.native import Recorder, both
from tests.engines.llama.test_checkpoint import save_meta

pytestmark = pytest.mark.slow
CASES = ("grouped heads", "free head width", "tied", "biases")
META_FILES = (1, 2, 4)
IDS = torch.arange(3, 15)[None]

Found = dict[str, Any]
"""What one rank found, by the name of a folder, or of a question."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint per case, and one per number of Meta's files."""
    made = {name: tmp_path_factory.mktemp("checkpoint") for name in (*CASES, *map(str, META_FILES))}
    for case in CASES:
        both(case, made[case])
    for files in META_FILES:
        save_meta(made[str(files)], files)
    return made


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two ranks found: all in one start of theirs, which takes most of the time."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_one_rank, (folders, out, port), nprocs=2)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _one_rank(rank: int, folders: dict[str, Path], out: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: Found = {name: everything(folder) for name, folder in folders.items()}
    torch.save({**found, "shares": shares(folders["grouped heads"]), "refusals": refusals()}, out / f"{rank}.pt")
    dist.destroy_process_group()


def double(value: Tensor) -> Tensor:
    return 2 * value


def flip_a_head(value: Tensor) -> Tensor:
    """Of [batch, head, token, key], a head of the second rank."""
    edited = value.clone()
    edited[:, 3] = edited[:, 3].flip(-1)
    return edited


@torch.no_grad()
def everything(folder: Path) -> tuple[list[Tensor], dict[tuple[str, int | None], Tensor]]:
    """The logits of a prompt, of a token after it and under edits, and every value of the prompt."""
    model, recorder = load(folder, max_seq_len=32), Recorder()
    model.listen(recorder)
    found = [model(IDS)]
    model.listen(None)
    found.append(model(IDS[:, :1], IDS.shape[1]))
    model.listen(Recorder((), attention_probabilities=flip_a_head, mlp_activations=double, attention_keys=double))
    found.append(model(IDS))
    return found, recorder.values


def shares(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Heads, local heads, and the shapes of one rank's weights and cache."""
    attention = load(folder, max_batch_size=2, max_seq_len=32).layers[0].attention
    heads = (attention.n_heads, attention.n_kv_heads, attention.n_local_heads, attention.n_local_kv_heads)
    return heads, tuple(attention.wq.weight.shape), tuple(attention.wo.weight.shape), tuple(attention.cache_k.shape)


def refusals() -> list[str]:
    """What is said about things that two ranks cannot share."""
    return [
        said(lambda: Attention(ModelArgs(dim=48, n_heads=3, max_seq_len=8))),
        said(lambda: Attention(ModelArgs(dim=48, n_heads=4, n_kv_heads=1, max_seq_len=8))),
        said(lambda: Transformer(ModelArgs(dim=32, n_layers=1, n_heads=4, vocab_size=61))),
        said(lambda: RowParallelLinear(4, 4)(torch.ones(2))),
    ]


def said(refused: Callable[[], object]) -> str:
    try:
        refused()
    except (UnsupportedModel, Unavailable) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("case", [*CASES, *map(str, META_FILES)])
def test_two_ranks_are_one(case: str, folders: dict[str, Path], ranks: list[Found]) -> None:
    logits, values = everything(folders[case])
    for rank in ranks:
        rank_logits, rank_values = rank[case]
        torch.testing.assert_close(rank_logits, logits, rtol=1e-4, atol=1e-4)
        assert rank_values.keys() == values.keys()
        for at, value in values.items():
            torch.testing.assert_close(rank_values[at], value, rtol=1e-4, atol=1e-4)


def test_each_rank_holds_its_part_alone(ranks: list[Found]) -> None:
    expected = ((4, 2, 2, 1), (32, 64), (64, 32), (2, 32, 1, 16))
    assert [rank["shares"] for rank in ranks] == [expected, expected]


def test_what_ranks_cannot_share_is_refused(ranks: list[Found]) -> None:
    expected = [
        "3 query heads do not divide among 2 ranks.",
        "1 key/value heads do not divide among 2 ranks.",
        "61 outputs do not divide among 2 ranks.",
        "Gradients do not cross ranks: load the model on one rank, or use torch.no_grad().",
    ]
    assert [rank["refusals"] for rank in ranks] == [expected, expected]
