"""Write into pages what their examples print: `python -m tests.docs docs/steps.md`. Look at the difference after it."""

import os
import sys
import tempfile
from pathlib import Path

import jackfield as jf
from tests.docs.page import run, shared, with_output


def write(page: Path) -> None:
    """Run the page's examples, and write what they print into it."""
    page = page.absolute()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed = [output for _, output in run(page, Path(folder))]
        finally:
            os.chdir(before)
    page.write_text(with_output(page.read_text(encoding="utf-8"), printed), encoding="utf-8")


def main() -> None:
    """The pages that the command line names."""
    with shared(jf.Model.demo()):
        for page in sys.argv[1:]:
            write(Path(page))


if __name__ == "__main__":
    main()
