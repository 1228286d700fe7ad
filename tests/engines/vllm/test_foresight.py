"""What is foreseen of a block: what the newest two of its code did alike."""

from types import CodeType

from jackfield.engines.vllm.foresight import MOST_CODES, Foresight
from jackfield.interleave.site import Port, Site

A, B = (Site(f"layers.{number}", Port.OUTPUT) for number in range(2))


def code(number: int) -> CodeType:
    return compile(f"x = {number}", "block", "exec")


def test_what_two_have_done_alike_is_foreseen_and_what_differed_is_not() -> None:
    """Kills: a sweep over layers, each of whose blocks would have its prompt's graphs cut for the layer before."""
    foresight, own = Foresight(), code(1)
    assert foresight.of(own) is None
    foresight.learn(own, {A})
    assert foresight.of(own) is None
    foresight.learn(own, {A})
    assert foresight.of(own) == {A}
    foresight.learn(own, {A, B})
    assert foresight.of(own) is None
    foresight.learn(own, {A, B})
    assert foresight.of(own) == {A, B}


def test_equal_code_is_the_same_and_other_code_is_not() -> None:
    foresight = Foresight()
    for _ in range(2):
        foresight.learn(code(1), set())  # each time another object, as each request brings its own
    assert foresight.of(code(1)) == frozenset()
    assert foresight.of(code(2)) is None
    assert foresight.of(None) is None


def test_no_more_codes_are_kept_than_said() -> None:
    foresight = Foresight()
    for number in range(MOST_CODES + 1):
        for _ in range(2):
            foresight.learn(code(number), {A})
    assert foresight.of(code(0)) is None
    assert foresight.of(code(1)) == {A}
