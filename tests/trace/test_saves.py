import pytest

from jackfield.errors import UnboundSave
from tests.trace.fakes import Part, execute

UNBOUND = {
    "appended": ("acts = []\n    acts.append(h.save())", r"rows = list\(\)\.save\(\).*rows\.append\(h\)"),
    "item": ("grid = {}\n    grid[0] = h.save()", r"`x = h\.save\(\)`"),
    "attribute": ("part.layer_output = h.save()", "binds to no name"),
    "argument": ("print(h.save())", "binds to no name"),
    "bare expression": ("part.layer_output.save()", r"`x = part\.layer_output\.save\(\)`"),
    "list element": ("x = [h.save()]", "binds to no name"),
    "tuple under one name": ("x = h.save(), 1", "binds to no name"),
    "starred pair": ("x, *y = h.save(), 1, 2", "binds to no name"),
    "item among names": ("x = {}\n    x[0], y = [1, 2].save()", "taken apart into what is no name"),
    "augmented": ("x = 1\n    x += h.save()", "binds to no name"),
    "condition": ("if h.save():\n        pass", "binds to no name"),
    "loop": ("for x in h.save():\n        pass", "binds to no name"),
    "inner function": ("def f():\n        y = h.save()\n    f()", "inner function"),
    "lambda": ("f = lambda: h.save()", "inner function"),
    "inner class": ("class A:\n        y = h.save()", "inner function or class"),
    "comprehension": ("x = [a.save() for a in [1]]", "binds to no name"),
    "inner with": ("with h.save() as x:\n        pass", "binds to no name"),
}


@pytest.mark.parametrize("name", UNBOUND)
def test_a_save_that_binds_nothing_is_refused_before_anything_runs(name: str) -> None:
    body, message = UNBOUND[name]
    ran: list[int] = []
    with pytest.raises(UnboundSave, match=message) as caught:
        execute(f"h = 3\nwith Trace() as t:\n    ran()\n    {body}", ran=lambda: ran.append(1), part=Part())
    assert not ran
    assert "<written" in str(caught.value)


@pytest.mark.parametrize("value", [None, 0, "", {}, [], (1, 2), {"a": None}, object, True])
def test_any_object_is_saved_under_one_rule(value: object) -> None:
    module = execute("a = 1\nwith Trace() as t:\n    a = value\n    a.save()\n    b = value.save()", value=value)
    assert module["a"] == value
    assert module["b"] == value


def test_the_tracers_own_save_stays_as_it_is() -> None:
    module = execute("with Trace() as t:\n    y = 2\n    t.save(x=y, z=3)")
    assert module["t"].saved == {"x": 2, "z": 3}
    assert "y" not in module


def test_a_save_with_arguments_is_a_method_of_the_objects_own() -> None:
    module = execute("import io\nwith Trace() as t:\n    x = thing.save('a', b=1).save()", thing=Saver())
    assert module["x"] == ("a", 1)


class Saver:
    def save(self, a: str, b: int) -> tuple[str, int]:
        return a, b
