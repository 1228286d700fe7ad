"""A model and its parts are no data: a copy of one would have half an engine."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import jackfield as jf

WAYS: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_and_its_parts_cannot_be_copied(model: jf.Model, prompt: list[int], way: str) -> None:
    """Kills: a second model over a copy of the engine, whose blocks never meet a value."""
    for part in (model, model.layers, model.layers[0], model.layers[0].attention, {"model": [model]}):
        if way == "copy" and isinstance(part, dict):
            continue  # which keeps the model itself
        with pytest.raises(jf.EngineError, match=r"cannot be copied or pickled.*another jackfield\.Model"):
            WAYS[way](part)
    with model.trace(prompt):
        shape = tuple(model.layers[0].layer_output.shape).save()
    assert shape == (1, len(prompt), model.hidden_size)
