"""What was asked of a harvest, as the manifest has it: enough to see whether two are the same."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from jackfield.engines.engine import Engine
from jackfield.errors import InvalidRequest
from jackfield.interventions.json_form import TENSORS, encoded
from jackfield.interventions.kinds import Intervention
from jackfield.interventions.shared import tensor_of


@dataclass(frozen=True, slots=True)
class Limits:
    """When a shard is full: at `shard_mb` megabytes (10^6 bytes) or `shard_prompts` prompts, whichever comes first."""

    shard_mb: float
    shard_prompts: int

    @classmethod
    def parse(cls, shard_mb: Any, shard_prompts: Any) -> "Limits":
        """InvalidRequest for a limit of nothing."""
        for name, given, kinds in (("shard_mb", shard_mb, int | float), ("shard_prompts", shard_prompts, int)):
            if isinstance(given, bool) or not isinstance(given, kinds) or not given > 0:
                raise InvalidRequest(f"{name}={given!r}: it has to be a {'whole ' * (kinds is int)}number above 0.")
        return cls(shard_mb, shard_prompts)


def document(
    engine: Engine,
    interventions: Sequence[Intervention],
    named: Mapping[str, Any],
    chat_template_kwargs: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The model and the options, as JSON has them; a tensor is its digest."""
    return {
        "model": _model(engine),
        "interventions": [_plain(each, named) for each in interventions],
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "chat_template_kwargs": None if chat_template_kwargs is None else repr(dict(chat_template_kwargs)),
    }


def _model(engine: Engine) -> dict[str, Any]:
    facts = engine.facts
    return {
        "name": getattr(engine.config, "_name_or_path", None),  # transformers' configurations have it, others not
        "engine": type(engine).__name__.removesuffix("Engine").lower(),
        "dtype": str(facts.dtype).removeprefix("torch."),
        **{name: getattr(facts, name) for name in ("num_layers", "num_heads", "hidden_size", "vocab_size")},
    }


def _plain(each: Intervention, named: Mapping[str, Any]) -> dict[str, Any]:
    held = {name: getattr(each, name) for name in TENSORS if hasattr(each, name)}
    digests = {name: _digest(tensor_of(given, named)) for name, given in held.items() if not _is_number(given)}
    return encoded(replace(cast("Any", each), **digests))


def _is_number(given: object) -> bool:
    return given is None or isinstance(given, int | float)


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    shape = "x".join(map(str, plain.shape))
    data: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return f"{str(plain.dtype).removeprefix('torch.')} {shape} sha256:{hashlib.sha256(data).hexdigest()}"
