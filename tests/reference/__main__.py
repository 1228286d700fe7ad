"""`python -m tests.reference`: for every zoo model, the values it lacks, and in which layers."""

from tests import zoo
from tests.reference.compare import BY_QUERY, TOKEN_AXIS
from tests.reference.record import Step, record


def lacking(step: Step) -> str:
    """The layer values that some layer has none of: all of them, or the numbers of those layers."""
    per_layer = [name for name in (*TOKEN_AXIS, *BY_QUERY) if name not in step.root]
    parts = []
    for name in per_layer:
        without = [i for i, values in enumerate(step.layers) if name not in values and f"{name}/0" not in values]
        if without:
            parts.append(name if len(without) == len(step.layers) else f"{name} {without}")
    return ", ".join(parts) or "-"


if __name__ == "__main__":
    for name in zoo.NAMES:
        steps = record(zoo.build(name), name, zoo.prompt(name, 12), 6)
        print(f"{name:24}{lacking(steps[0])}")
