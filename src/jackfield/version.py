"""Which jackfield this is."""

from importlib import metadata
from typing import Final


def installed() -> str:
    """The installed package's version; "unknown" where it is run from its source without being installed."""
    try:
        return metadata.version("jackfield")
    except metadata.PackageNotFoundError:
        return "unknown"


__version__: Final = installed()
