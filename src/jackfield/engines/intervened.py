"""Requests that run beside interventions: each gets the block of those that are its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jackfield.engines.engine import Engine, Request
from jackfield.interventions.asked import per_prompt
from jackfield.interventions.plan import Known, Plan


def with_interventions(
    requests: Sequence[Request], given: object, engine: Engine, named: Mapping[str, Any]
) -> list[Request]:
    """The requests with their blocks; those without interventions stay plain. `named` are the model's shared objects.

    InvalidIntervention, before anything runs, for what does not fit the model or a request.
    """
    known = Known()
    plans: dict[int, Plan] = {}  # one list for all prompts is one tuple, and is held against the model once
    found = per_prompt(given, len(requests))
    for own in found:
        if own and id(own) not in plans:
            plans[id(own)] = Plan.of(own, engine, named, known)
    return [
        with_block(request, plans[id(own)], engine) if own else request
        for request, own in zip(requests, found, strict=True)
    ]


def with_block(request: Request, plan: Plan, engine: Engine) -> Request:
    """The request with the block of a plan. InvalidRequest, InvalidIntervention where the two do not fit."""
    engine.admit_block(request.prompt_token_ids)
    return replace(request, block=plan.block(len(request.prompt_token_ids), request.sampling.max_tokens))
