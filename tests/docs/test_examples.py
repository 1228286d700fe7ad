"""Every example of README.md and docs/ runs, and prints what the page says."""

from pathlib import Path

import pytest

import jackfield as jf
from tests.docs.page import ROOT, agree, examples, run, shared, with_output

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
RUN = [page for page in PAGES if examples(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs(page: Path, sample: jf.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with shared(sample):
        for example, printed in run(page, tmp_path):
            if not agree(printed, example.expected):
                assert printed == example.expected, f"{page.name}, line {example.line}"


PAGE = """
```python
with open("x") as file:
    pass
```

Words.

```python notest
not run
```

```python
print(1)
```

```text
2
```

```text
unrelated
```

```console
$ jackfield --help
Usage
```
"""


def test_the_fences_that_are_run():
    first, second, command = examples(PAGE)
    assert (first.line, first.expected) == (3, "")
    assert (second.code, second.line, second.expected) == ("print(1)\n", 14, "2\n")
    assert (command.code, command.line, command.expected) == ("$ jackfield --help", 26, "Usage\n")


def test_an_example_runs_at_its_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Words.\n\n```python\nx = 1\n```\n\n```python\nprint(x)\nassert x == 2\n```\n")
    ran = run(page, tmp_path)
    next(ran)
    with pytest.raises(AssertionError) as caught:
        next(ran)
    assert [(entry.path.name, entry.lineno + 1) for entry in caught.traceback][-1] == ("page.py", 9)


def test_a_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```console\n$ jackfield look --help\n```\n")
    ((example, printed),) = run(page, tmp_path)
    assert (example.expected, "what a model makes of a prompt" in printed) == ("", True)


def test_output_is_written_into_the_page():
    text = "```python\nprint(1)\n```\n\n```text\n2\n```\n\n```console\n$ jackfield x\n```\n\n```python\nprint(3)\n```\n"
    written = with_output(text, ["1", "two", "3"])
    assert written == text.replace("2", "1").replace("x\n", "x\ntwo\n").removesuffix("\n") + "\n\n```text\n3\n```\n"
    assert [example.expected for example in examples(written)] == ["1\n", "two\n", "3\n"]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("p 0.12", "p  0.12\n", True),
        ("p 0.13", "p 0.12", True),
        ("p -0.00", "p 0.01", True),
        ("p 0.14", "p 0.12", False),
        ("p 0.120", "p 0.12", False),
        ("5 tokens", "6 tokens", False),
        ("p 0.12 q", "p 0.12", False),
        ("0.12 0.13", "0.12", False),
    ],
)
def test_outputs_agree(printed: str, expected: str, same: bool):
    assert agree(printed, expected) is same
