"""Raw places on several ranks: never one rank's part in silence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jackfield as jf
from jackfield.engines.vllm.parts import Ranks
from jackfield.engines.vllm.raw_parts import RawJoint
from tests.engines.vllm.ranks_in_threads import on_ranks

WHOLE = torch.arange(24.0).view(2, 12)


class RowParallelLinear(nn.Module):
    """With what is read of vLLM's."""

    input_is_parallel, input_size_per_partition = True, 6


class ColumnParallelLinear(nn.Module):
    """Of four query heads of width 2 and one key and value head, on two ranks."""

    gather_output, output_partition_sizes, num_kv_head_replicas = False, [4, 2, 2], 2


def there_and_back(module: nn.Module, port: str, parts: list[Tensor]) -> list[Tensor]:
    def body(ranks: Ranks) -> Tensor:
        joint = RawJoint.of(ranks, nn.ModuleDict({"a": module}), "a", port)
        whole = joint.join(parts[ranks.rank], f"a.{port}")
        assert joint.cut(whole, parts[0].shape[-1]).equal(parts[ranks.rank])
        return whole

    return on_ranks(len(parts), body)


def test_what_is_the_same_everywhere_is_whole() -> None:
    for whole in there_and_back(nn.Linear(2, 2), "output", [WHOLE, WHOLE]):
        assert whole.equal(WHOLE)


def test_a_row_parallel_layers_input_is_joined() -> None:
    for whole in there_and_back(RowParallelLinear(), "input", [WHOLE[:, :6], WHOLE[:, 6:]]):
        assert whole.equal(WHOLE)


def test_queries_keys_and_values_in_one_are_joined_each_by_itself() -> None:
    q, k, v = WHOLE.split([8, 2, 2], -1)
    parts = [torch.cat([q[:, :4], k, v], -1), torch.cat([q[:, 4:], k, v], -1)]
    for whole in there_and_back(ColumnParallelLinear(), "output", parts):
        assert whole.equal(WHOLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_the_same_but_for_rounding_is_whole(dtype: torch.dtype) -> None:
    """Kills: bits compared, which differ where four ranks sum, each in an order of its own."""
    off = WHOLE * (1 + torch.finfo(dtype).eps)
    parts = [WHOLE.to(dtype), off.to(dtype), WHOLE.to(dtype), WHOLE.to(dtype)]
    assert not parts[0].equal(parts[1])
    for whole in there_and_back(nn.Linear(2, 2), "output", parts):
        torch.testing.assert_close(whole.float(), WHOLE, rtol=2e-2, atol=0)


class Attention(nn.Module):
    """What vLLM's is known by."""

    impl = nn.Identity()


@pytest.mark.parametrize("port", ["inputs", "output"])
def test_what_an_attention_op_takes_and_gives_are_heads(port: str) -> None:
    for whole in there_and_back(Attention(), port, [WHOLE[:, :6], WHOLE[:, 6:]]):
        assert whole.equal(WHOLE)
    for whole in there_and_back(Attention(), port, [WHOLE[:, :6], WHOLE[:, :6], WHOLE[:, 6:], WHOLE[:, 6:]]):
        assert whole.equal(WHOLE)


@pytest.mark.parametrize(("module", "port"), [(nn.Linear(2, 2), "output"), (RowParallelLinear(), "output")], ids=str)
def test_what_is_not_known_is_refused(module: Any, port: str) -> None:
    with pytest.raises(jf.Unavailable, match=r"a\.output is not the same on the 2 ranks"):
        there_and_back(module, port, [WHOLE[:, :6], WHOLE[:, 6:]])


def test_one_rank_is_not_compared() -> None:
    joint = on_ranks(1, lambda ranks: RawJoint.of(ranks, nn.ModuleDict({"a": nn.Linear(2, 2)}), "a", "output"))[0]
    assert joint.join(WHOLE, "a.output") is WHOLE
