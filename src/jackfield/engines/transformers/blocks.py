"""Which modules are the decoder blocks: the longest row of sibling modules that the prompt went through one by one.

A row is a ModuleList, a Sequential or a ModuleDict. Experts are rows too, but lie inside a block; vision towers are
rows that a text prompt never enters. Both are left out by what was seen, not by name.
"""

from itertools import pairwise

from torch import nn
from transformers import PreTrainedModel

from jackfield.engines.transformers.recording import Call, Recording, modules_of
from jackfield.errors import UnsupportedModel

_ROWS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: PreTrainedModel, recording: Recording, stated: str | None = None) -> list[Call]:
    """The call of each decoder block, in order. `stated` is the path of the row, where a family states it.

    Raises:
        UnsupportedModel: there is no such row, or it is an encoder-decoder.
    """
    if getattr(model.config, "is_encoder_decoder", False):  # foreign: every PretrainedConfig of 5.x has it
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder; jackfield serves decoder-only language models."
        )
    rows = [stated] if stated is not None else _outermost_rows(model)
    found = [calls for calls in (_calls_in(model, recording, path) for path in rows) if calls]
    if not found:
        raise UnsupportedModel(
            f"Looked in {type(model).__name__} for a ModuleList of decoder blocks that a prompt passes through one "
            f"after the other, and found none{f' at {stated!r}' if stated else ''}. State its path: "
            "jf.Model(..., family=Family(blocks='path.to.the.list'))."
        )
    return max(found, key=lambda calls: (_is_stream(calls), len(calls), _size(calls)))


def _outermost_rows(model: nn.Module) -> list[str]:
    rows = [path for path, module in modules_of(model).items() if isinstance(module, _ROWS) and len(module)]
    return [path for path in rows if not any(path.startswith(f"{other}.") for other in rows)]


def _calls_in(model: nn.Module, recording: Recording, row: str) -> list[Call]:
    """The calls of the members that each ran once on a stream; empty unless that is all of those that ran, in order."""
    paths = [
        f"{row}.{name}" for name, member in model.get_submodule(row).named_children() if len(list(member.children()))
    ]
    calls = [call for path in paths for call in recording.calls_of(path)]
    once = len({call.path for call in calls}) == len(calls)
    return calls if once and all(_carries(call, recording.tokens) for call in calls) else []


def _carries(call: Call, tokens: int) -> bool:
    return call.argument is not None and call.result is not None and tokens in call.result.value.shape


def _is_stream(calls: list[Call]) -> bool:
    """Whether each call takes what the one before it gave."""
    return all(
        before.result is not None and after.argument is not None and after.argument.equals(before.result)
        for before, after in pairwise(calls)
    )


def _size(calls: list[Call]) -> int:
    return sum(parameter.numel() for call in calls for parameter in call.module.parameters())
