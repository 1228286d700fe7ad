"""jackfield on the command line: one file per command.

Results go to stdout, as tables or with `--json`; everything else goes to stderr. An error of jackfield's own is one
line on stderr and exit status 1; a bad argument is exit status 2.
"""

import sys

import typer

from jackfield.cli.generate import generate
from jackfield.cli.harvest import harvest
from jackfield.cli.look import look
from jackfield.cli.support import support
from jackfield.engines.ranks import Ended
from jackfield.errors import JackfieldError


def main() -> None:
    """Run the command that the arguments name, and end the process where it fails."""
    try:
        application()()
    except Ended:
        pass  # a rank that follows has nothing to say
    except JackfieldError as error:
        print(f"jackfield: {one_line(str(error))}", file=sys.stderr)
        sys.exit(1)


def application() -> typer.Typer:
    """The commands, as typer has them."""
    commands = typer.Typer(
        name="jackfield",
        help="Read and edit what a language model computes while it runs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for command in (look, generate, harvest, support):
        commands.command()(command)
    return commands


def one_line(message: str) -> str:
    """`message` with its lines joined, for a terminal."""
    return " ".join(message.split())
