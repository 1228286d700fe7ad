"""One harvest from its arguments to its folder: everything is checked before anything runs or is written."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from jackfield.engines.engine import Engine, Request
from jackfield.engines.intervened import with_block
from jackfield.engines.prompt import One, Prompt, parse_prompt, parse_prompts
from jackfield.errors import InvalidIntervention, InvalidRequest
from jackfield.harvest.asked import Limits, document
from jackfield.harvest.folder import opened
from jackfield.harvest.manifest import Manifest
from jackfield.harvest.reading import Harvest
from jackfield.harvest.row_axis import RowAxis
from jackfield.harvest.running import Job, Run, Tally
from jackfield.harvest.stored import parse_dtype
from jackfield.interventions.documents import checked
from jackfield.interventions.kinds import Intervention
from jackfield.interventions.plan import Plan


def harvest(
    engine: Engine,
    named: Mapping[str, Any],
    request: Callable[[Prompt], Request],
    prompts: object,
    folder: str | Path,
    interventions: object,  # parsed here
    *,
    chat_template_kwargs: Mapping[str, Any] | None,
    dtype: object,
    limits: Limits,
    on_progress: Callable[[Tally], object] | None,
) -> Harvest:
    """What `Model.harvest` says. `request` makes an admitted request of a prompt, `named` are the shared objects."""
    given = _listed(interventions)
    plan, axis, stored = Plan.of(given, engine, named), RowAxis.of(given), parse_dtype(dtype)

    def with_plan(prompt: Prompt) -> Request:
        return with_block(request(prompt), plan, engine)

    stream = drawn(prompts)
    asked = document(engine, given, named, chat_template_kwargs, stored)
    with opened(Path(folder)) as place:
        manifest = Manifest(asked)
        if place.has_manifest():
            manifest = Manifest.read(place.path)
            manifest.check_asked(asked, place.path)
            Harvest(place.path)  # all of its files are there
        else:
            place.write(None, manifest)
        Run(Job(engine, with_plan, axis, plan.shapes, stored, limits, on_progress), place, manifest).run(stream)
    return Harvest(folder)


def _listed(interventions: object) -> tuple[Intervention, ...]:
    if isinstance(interventions, Intervention) or not isinstance(interventions, Iterable):
        raise InvalidIntervention(f"interventions={interventions!r:.80}: write a list, [jackfield.Capture(...), ...].")
    return tuple(map(checked, cast("Iterable[object]", interventions)))


def drawn(prompts: object) -> Iterator[Prompt | InvalidRequest]:
    """The prompts as a stream, an error in the place of one that is none. InvalidRequest for a list that is none."""
    if isinstance(prompts, Iterator):
        return map(_parsed, cast("Iterator[object]", prompts))
    parsed = parse_prompts(prompts)
    return iter([parsed.prompt] if isinstance(parsed, One) else parsed.prompts)


def _parsed(prompt: object) -> Prompt | InvalidRequest:
    try:
        return parse_prompt(prompt)
    except InvalidRequest as error:
        return error
