"""Interventions as JSON, and back with the same meaning.

One is an object, several are an array of objects:

    {"format": 1, "kind": "Steer", "site": "layers.18.layer_output", "vector": {"safetensors": "<base64>"},
     "scale": 4.0, "relative": false, "positions": [3, {"start": 5, "stop": 9, "step": 1}], "heads": null}

A tensor is base64 of a safetensors file with the one entry "tensor", or `{"shared": "<name>"}`. Reading runs no code.
Nothing is guessed: an unknown kind, key or format is refused.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Final, cast

import safetensors
import safetensors.torch
from torch import Tensor

from jackfield.errors import InvalidIntervention, near
from jackfield.interleave.reference import Shared
from jackfield.interventions.shared import Named

FORMAT: Final = 1
"""Raised when a reader of the last one would misunderstand what is written."""


def written(document: Any) -> str:
    """JSON text of what `encoded` gives, or a list of it."""
    return json.dumps(document, allow_nan=False)


def parsed(text: Any) -> Any:
    """What JSON text says; JSON that was parsed already is taken as it is."""
    if not isinstance(text, str | bytes | bytearray):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is one too
        raise InvalidIntervention(f"This is not JSON: {error}.") from None


def one_of(document: Any) -> Any:
    """The document, where it is of one intervention."""
    if isinstance(document, list):
        raise InvalidIntervention("This is a list of interventions; read it with jackfield.from_json(text).")
    return document


def encoded(intervention: Any) -> dict[str, Any]:
    """An intervention as what JSON can hold."""
    listed = {each.name: _plain(getattr(intervention, each.name)) for each in fields(intervention)}
    return {"format": FORMAT, "kind": type(intervention).__name__, **listed}


def decoded(document: Any, kinds: Mapping[str, type]) -> Any:
    """The intervention that `encoded` gave. InvalidIntervention says what is wrong with a document."""
    if not isinstance(document, dict):
        raise InvalidIntervention(f"An intervention in JSON is an object with a 'kind'; this is {document!r:.80}.")
    listed = dict(cast("dict[str, Any]", document))
    _check_format(listed.pop("format", None))
    name = listed.pop("kind", None)
    if not isinstance(name, str) or name not in kinds:
        raise InvalidIntervention(
            f"There is no kind of intervention {name!r}; kinds are {', '.join(kinds)}.{near(str(name), kinds)}"
        )
    _check_keys(name, listed, fields(kinds[name]))
    return kinds[name](**{key: _read(name, key, value) for key, value in listed.items()})


def _check_format(found: object) -> None:
    if found == FORMAT and not isinstance(found, bool):
        return
    if found is None:
        raise InvalidIntervention(f'An intervention in JSON says its format; add "format": {FORMAT}.')
    raise InvalidIntervention(
        f"This intervention is of format {found!r}, and this version of jackfield reads format {FORMAT}. Write it "
        "again with the version that is to read it, or install the version that wrote it."
    )


def _check_keys(kind: str, listed: Mapping[str, Any], known: Sequence[Field[Any]]) -> None:
    names = [each.name for each in known]
    for key in listed:
        if key not in names:
            raise InvalidIntervention(f"{kind} has no {key!r}; it has {', '.join(names)}.{near(str(key), names)}")
    for each in known:
        if each.default is MISSING and each.name not in listed:
            raise InvalidIntervention(f"{kind} needs {each.name!r}; this one has {', '.join(listed) or 'nothing'}.")


def _plain(value: Any) -> Any:
    """A field as JSON has it."""
    if isinstance(value, Named):
        return {"shared": value.name}
    if isinstance(value, Shared):
        value = value.value
    if isinstance(value, Tensor):
        data = safetensors.torch.save({"tensor": value.detach().cpu().contiguous()})
        return {"safetensors": base64.b64encode(data).decode("ascii")}
    if isinstance(value, range):
        return {"start": value.start, "stop": value.stop, "step": value.step}
    if isinstance(value, tuple):
        return [_plain(each) for each in cast("Iterable[Any]", value)]
    return value


TENSORS: Final = ("vector", "value", "directions", "bias")


def _read(kind: str, key: str, value: Any) -> Any:
    """A field out of what JSON has of it."""
    try:
        if key in TENSORS:
            return _tensor(value) if isinstance(value, dict) or key != "bias" else value
        if isinstance(value, list):
            return [_range(each) if isinstance(each, dict) else each for each in cast("list[Any]", value)]
    except ValueError as error:
        raise InvalidIntervention(f"{kind}, {key}: {error}") from None
    return value


def _range(value: Any) -> range:
    ends = [value.get(name) for name in ("start", "stop", "step")]
    if set(value) != {"start", "stop", "step"} or not all(type(end) is int for end in ends) or not ends[2]:
        raise ValueError(f'{value!r} is no range; write {{"start": 3, "stop": 9, "step": 1}}.')
    return range(*ends)


def _tensor(value: Any) -> Tensor | str:
    match value:
        case {"shared": str(name), **rest} if not rest:
            return name
        case {"safetensors": str(text), **rest} if not rest:
            return _loaded(text)
        case _:
            raise ValueError(
                f'{value!r:.80} is no tensor; write {{"safetensors": "<base64>"}} or {{"shared": "<name>"}}.'
            )


def _loaded(text: str) -> Tensor:
    try:
        held = safetensors.torch.load(base64.b64decode(text, validate=True))
    except (binascii.Error, safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"this is no base64 of a safetensors file: {error}.") from None
    if set(held) != {"tensor"}:
        raise ValueError(f"its safetensors hold {', '.join(held) or 'nothing'}, and should hold 'tensor' alone.")
    return held["tensor"]
