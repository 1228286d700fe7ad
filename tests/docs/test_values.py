"""The table of values in docs/values.md is what the code says."""

import runpy
from collections.abc import Callable

import pytest

from tests.docs.page import ROOT

with_table: Callable[[str], str] = runpy.run_path(str(ROOT / "docs" / "make_values.py"))["with_table"]


def test_the_table_is_up_to_date():
    text = (ROOT / "docs" / "values.md").read_text(encoding="utf-8")
    assert text == with_table(text), "run: python docs/make_values.py"


def test_a_table_out_of_date_is_noticed():
    text = (ROOT / "docs" / "values.md").read_text(encoding="utf-8")
    old = text.replace("| layer | `layer_mid` | [1, t, h] |", "| layer | `layer_mid` | [1, h] |")
    assert old != text
    assert with_table(old) == text


def test_a_page_without_markers_is_refused():
    with pytest.raises(SystemExit, match="has no lines <!-- values"):
        with_table("# Values")
