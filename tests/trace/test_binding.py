import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch

from jackfield.trace.binding import bind, keep, visible_names
from tests.trace.fakes import Part


def set_names(**values: Any) -> None:
    bind(sys._getframe(1), values)


def test_a_local_and_one_that_had_no_value() -> None:
    a = 1
    if a > 1:
        b = 0
    set_names(a=2, b=3)
    assert (a, b) == (2, 3)


def test_an_outer_variable_and_a_cell() -> None:
    outer = 1

    def inner() -> int:
        nonlocal outer
        cell = 1
        get = lambda: (cell, outer)  # noqa: E731
        set_names(outer=5, cell=6)
        assert get() == (6, 5)
        return cell

    assert (inner(), outer) == (6, 5)


def test_other_locals_keep_their_objects() -> None:
    kept, a = [1], 1
    same = kept
    set_names(a=2)
    assert kept is same
    assert a == 2


declared = 0


def test_a_declared_global() -> None:
    global declared
    declared = 1
    set_names(declared=9)
    assert globals()["declared"] == 9


def test_a_class_body() -> None:
    class A:
        a = 1
        set_names(a=2)

    assert A.a == 2


def test_a_module() -> None:
    module: dict[str, Any] = {"bind": bind, "sys": sys}
    exec("bind(sys._getframe(), {'a': 4})", module)
    assert module["a"] == 4


def test_a_local_without_a_value_hides_the_global() -> None:
    def f() -> dict[str, Any]:
        seen = visible_names(sys._getframe())
        declared = 2  # noqa: F841
        return seen

    assert "declared" not in f()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a function's f_locals is no copy from 3.13 on")
def test_nothing_is_kept_alive_by_having_looked() -> None:
    def f(look: Callable[[FrameType], Any]) -> int:
        value = object()
        count = sys.getrefcount(value)
        look(sys._getframe())
        return sys.getrefcount(value) - count

    for look in (visible_names, lambda frame: bind(frame, {"count": frame.f_locals["count"]})):
        assert f(look) == 0


Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Record:
    rows: Any
    note: str = ""


def view() -> torch.Tensor:
    return torch.arange(1000.0)[3:5]


CONTAINERS = {
    "list": (lambda x: [x, 1], lambda kept: kept[0]),
    "tuple": (lambda x: (x,), lambda kept: kept[0]),
    "namedtuple": (lambda x: Point(x, 1), lambda kept: kept.x),
    "dict": (lambda x: {"a": [x]}, lambda kept: kept["a"][0]),
    "ordered": (lambda x: OrderedDict(a=x), lambda kept: kept["a"]),
    "defaultdict": (lambda x: defaultdict(list, a=[x]), lambda kept: kept["a"][0]),
    "set": (lambda x: {x}, lambda kept: next(iter(kept))),
    "frozenset": (lambda x: frozenset([x]), lambda kept: next(iter(kept))),
    "dataclass": (lambda x: Record({"deep": x}, "n"), lambda kept: kept.rows["deep"]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_kept_tensor_owns_its_memory_alone(name: str) -> None:
    make, get = CONTAINERS[name]
    original = make(torch.arange(1000.0, requires_grad=True)[3:5])
    kept = keep(original)
    assert type(kept) is type(original)
    assert get(kept).tolist() == [3, 4]
    assert not get(kept).requires_grad
    assert get(kept).untyped_storage().nbytes() == 8
    assert get(original).requires_grad, "the original has been changed"


def test_a_whole_tensor_on_the_cpu_is_not_copied() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    assert keep(x).data_ptr() == x.data_ptr()
    assert keep(x).dtype == torch.bfloat16


def test_one_tensor_twice_is_one_tensor() -> None:
    x = view()
    a, (b, c) = keep([x, (x, {"x": x})])
    assert a is b is c["x"]


def test_a_tensor_born_in_inference_mode_can_be_changed_afterwards() -> None:
    with torch.inference_mode():
        kept = keep({"x": torch.ones(2)})["x"]
    assert not kept.is_inference()
    kept += 1


def test_other_objects_stay_as_they_are() -> None:
    part, counts = Part(), Counter("aab")
    kept = keep([part, counts, "a", None, 3])
    assert kept[0] is part
    assert kept[1] == counts
    assert kept[2:] == ["a", None, 3]


def test_a_list_may_hold_itself() -> None:
    loop: list[Any] = [view()]
    loop.append(loop)
    kept = keep(loop)
    assert kept[1] is kept
    assert kept[0].untyped_storage().nbytes() == 8
