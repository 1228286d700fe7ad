"""nnsight, as its README writes these jobs: `trace` for one forward pass, `generate` with a bounded `tracer.iter`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import nnsight
from nnsight import TransformersModel
from torch import Tensor

from bench.jobs import LONG_LAYER, NEW_TOKENS, Cases
from bench.models import Models


def cases(models: Models) -> Cases:
    found = {name: partial(case, _model(models), models.ids) for name, case in _CASES[models.job].items()}
    if models.job == "prompt":  # it reads what the model computes, and only eager attention computes patterns
        found["patterns"] = partial(patterns, _model(models, "eager"), models.ids)
    return found


def _model(models: Models, attention: str = "sdpa") -> Any:
    return TransformersModel(models.twin(attention), tokenizer=models.tokenizer)


def untouched(model: Any, ids: Tensor) -> Sequence[Tensor]:
    with model.trace(ids):
        pass
    return []


def streams(model: Any, ids: Tensor) -> Sequence[Tensor]:
    with model.trace(ids):
        found = nnsight.save([])
        for layer in model.model.layers:
            found.append(layer.output)
    return found


def patterns(model: Any, ids: Tensor) -> Sequence[Tensor]:
    with model.trace(ids):
        found = nnsight.save([])
        for layer in model.model.layers:
            found.append(layer.self_attn.output[1])
    return found


def layer(model: Any, ids: Tensor) -> Sequence[Tensor]:
    with model.trace(ids):
        stream = model.model.layers[LONG_LAYER].output.save()
    return [stream]


def edits(model: Any, ids: Tensor) -> Sequence[Tensor]:
    with model.trace(ids):
        for layer in model.model.layers:
            layer.output[:] *= 1.01
    return []


def untouched_generation(model: Any, ids: Tensor) -> Sequence[Tensor]:
    with model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False):
        pass
    return []


def streams_of_generation(model: Any, ids: Tensor) -> Sequence[Tensor]:
    with model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False) as tracer:
        found = nnsight.save([])
        for _ in tracer.iter[:NEW_TOKENS]:
            for layer in model.model.layers:
                found.append(layer.output)
    return found


_CASES = {
    "generation": {"untouched": untouched_generation, "streams": streams_of_generation},
    "prompt": {"untouched": untouched, "streams": streams},
    "long": {"layer": layer},
    "overhead": {"untouched": untouched, "reads": streams, "edits": edits},
}
