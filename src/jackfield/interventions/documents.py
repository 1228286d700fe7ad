"""JSON of one intervention or several."""

from collections.abc import Iterable
from typing import Any, cast

from jackfield.errors import InvalidIntervention
from jackfield.interventions.json_form import decoded, encoded, parsed, written
from jackfield.interventions.kinds import Intervention, kinds


def to_json(interventions: Intervention | Iterable[Intervention]) -> str:
    """One intervention, or several in their order, as JSON text; `from_json` gives the same back.

    Tensors are base64 of safetensors, or the name that they are shared under (`model.share(tensor, name=...)`).
    """
    if isinstance(interventions, Intervention):
        return interventions.to_json()
    return written([encoded(checked(each)) for each in interventions])


def from_json(text: Any) -> Any:
    """The intervention, or the list of them, that `to_json` wrote: of text, or of JSON that was parsed already.

    It runs no code, so that it may come from anyone. InvalidIntervention for what is not JSON, another format, unknown
    kinds and keys, and fields that no intervention can have. Whether a model has that site, and whether the names of
    shared tensors are known, is seen in `model.generate`.
    """
    document = parsed(text)
    if isinstance(document, list):
        return [decoded(each, kinds()) for each in cast("list[Any]", document)]
    return decoded(document, kinds())


def checked(given: object) -> Intervention:
    """`given`, if it is an intervention."""
    if not isinstance(given, Intervention):
        raise InvalidIntervention(f"{given!r:.80} is no intervention; interventions are {', '.join(kinds())}.")
    return given
