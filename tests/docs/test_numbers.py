"""The tables in docs/numbers.md are what the tests allow and what they compare."""

import re
import runpy
from typing import Any

from tests.docs.page import ROOT
from tests.engines.transformers.bfloat16 import BFLOAT16
from tests.reference.compare import BY_QUERY, TOKEN_AXIS

make: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "make_numbers.py"))
PAGE = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")


def test_the_allowances_are_those_of_the_tests():
    assert make["with_section"](PAGE, "allowances", make["allowances_table"]()) == PAGE, "run docs/make_numbers.py"


def test_every_value_was_measured_and_kept_to_the_tolerance():
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| \S+ \| (\S+) \| \S+ \|$", PAGE, flags=re.MULTILINE)
    assert {value for value, *_ in rows} == set(TOKEN_AXIS) | BY_QUERY
    assert all(float(error) <= BFLOAT16 for _, *errors in rows for error in errors)
