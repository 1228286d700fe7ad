"""Which interventions each prompt of a call has."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from jackfield.errors import InvalidIntervention
from jackfield.interventions.documents import checked
from jackfield.interventions.kinds import Intervention

FORMS = "one list for all prompts, [Steer(...), ...], or one list per prompt, [[Steer(...)], [], ...]"


def per_prompt(given: object, count: int) -> list[tuple[Intervention, ...]]:
    """The interventions of each of `count` prompts; one list for all is one tuple, the same object for each.

    InvalidIntervention for what is neither a list of interventions nor a list of such lists.
    """
    if isinstance(given, Intervention) or not isinstance(given, Sequence | tuple) or isinstance(given, str):
        raise InvalidIntervention(f"interventions={given!r:.80}: write {FORMS}.")
    listed = cast("Sequence[Any]", given)
    if not any(isinstance(each, list | tuple) for each in listed):
        return [tuple(map(checked, listed))] * count
    if not all(isinstance(each, list | tuple) for each in listed):
        raise InvalidIntervention(f"interventions holds both interventions and lists of them: write {FORMS}.")
    if len(listed) != count:
        raise InvalidIntervention(f"interventions holds {len(listed)} lists, and there are {count} prompts.")
    return [tuple(map(checked, cast("Iterable[object]", each))) for each in listed]
