# ruff: noqa: C408 - `list().save()` is the form that the docs teach
"""jackfield: traces as a user writes them. Each gives one token, or 32 where generating is the job."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

import jackfield as jf
from bench.jobs import LONG_LAYER, NEW_TOKENS, Cases
from bench.models import Models


def cases(models: Models) -> Cases:
    model = jf.Model(models.twin(), tokenizer=models.tokenizer if models.job != "overhead" else False)
    ids = models.ids[0].tolist()
    return {name: partial(case, model, ids) for name, case in _CASES[models.job].items()}


def untouched(model: jf.Model, ids: list[int]) -> Sequence[Tensor]:
    with model.trace(ids):
        pass
    return []


def streams(model: jf.Model, ids: list[int]) -> Sequence[Tensor]:
    with model.trace(ids):
        found = list().save()
        for layer in model.layers:
            found.append(layer.layer_output)
    return found


def patterns(model: jf.Model, ids: list[int]) -> Sequence[Tensor]:
    with model.trace(ids):
        found = list().save()
        for layer in model.layers:
            found.append(layer.attention_probabilities)
    return found


def layer(model: jf.Model, ids: list[int]) -> Sequence[Tensor]:
    with model.trace(ids):
        stream = model.layers[LONG_LAYER].layer_output.save()
    return [stream]


def edits(model: jf.Model, ids: list[int]) -> Sequence[Tensor]:
    with model.trace(ids):
        for layer in model.layers:
            layer.layer_output[:] *= 1.01
    return []


def untouched_generation(model: jf.Model, ids: list[int]) -> Sequence[Tensor]:
    with model.trace(ids, max_tokens=NEW_TOKENS):
        pass
    return []


def streams_of_generation(model: jf.Model, ids: list[int]) -> Sequence[Tensor]:
    with model.trace(ids, max_tokens=NEW_TOKENS) as t:
        found = list().save()
        for _ in t.iter[:]:
            for layer in model.layers:
                found.append(layer.layer_output)
    return found


_CASES = {
    "generation": {"untouched": untouched_generation, "streams": streams_of_generation},
    "prompt": {"untouched": untouched, "streams": streams, "patterns": patterns},
    "long": {"layer": layer},
    "overhead": {"untouched": untouched, "reads": streams, "edits": edits},
}
