"""An engine that runs every pass in one way has nothing to say of ways."""

from tests.contract.conftest import subject


def test_engines_of_one_way_count_nothing() -> None:
    assert subject("fake").model.stats() == {}
    assert subject("transformers").model.stats() == {}
