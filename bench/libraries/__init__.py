"""What each library times: a module each, with `cases(models)`, to be imported in that library's environment alone."""

from importlib import import_module

from bench.jobs import BY_HAND, PLAIN, Cases, key
from bench.models import Models

MODULES = {"jackfield": "jackfield", "nnsight": "nnsight", "TransformerLens": "transformerlens"}
BASELINES = ("forward", "generate")


def cases(library: str, models: Models) -> Cases:
    """All that a library's process times in a job: its own cases, and plain transformers' on the same weights."""
    from bench.libraries import transformers

    by_hand = transformers.cases(models)
    found = {key(PLAIN if name in BASELINES else BY_HAND, name): case for name, case in by_hand.items()}
    own = import_module(f"bench.libraries.{MODULES[library]}").cases(models)
    return found | {key(library, name): case for name, case in own.items()}
