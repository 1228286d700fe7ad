"""The families whose structure does not tell everything. Any other model needs no line here."""

from jackfield.values.families.family import Family
from jackfield.values.families.gemma import GEMMA3N, GEMMA4

FAMILIES: tuple[Family, ...] = (GEMMA3N, GEMMA4)


def family_of(model_type: str) -> Family:
    """What is stated of `model_type`; an empty family where nothing is."""
    return next((family for family in FAMILIES if model_type in family.model_types), Family())
