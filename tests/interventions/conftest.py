"""The engines of the contract suite."""

from tests.contract.conftest import engine as engine
from tests.contract.conftest import fake as fake
from tests.contract.conftest import model as model
from tests.contract.conftest import prompts as prompts
