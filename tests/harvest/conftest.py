"""The engines of the contract suite, and a folder to harvest into."""

from pathlib import Path

import pytest

from tests.contract.conftest import engine as engine
from tests.contract.conftest import fake as fake
from tests.contract.conftest import model as model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "activations"
