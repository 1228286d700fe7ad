"""Every link in the pages leads somewhere, and every page is reached from the index."""

import re
from pathlib import Path

import pytest

from tests.docs.page import ROOT

PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def links(page: Path) -> list[str]:
    """The targets of a page's links, in order."""
    return _LINK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    inside = [target for target in links(page) if "://" not in target]
    assert [target for target in inside if not (page.parent / target).exists()] == []


def test_every_page_and_notebook_is_in_the_index():
    folder = ROOT / "docs"
    pages = {path.relative_to(folder).as_posix() for path in (*folder.glob("*.md"), *folder.glob("notebooks/*.ipynb"))}
    assert pages - {"index.md"} <= set(links(folder / "index.md"))
