"""A lifted body does what the same statements do where they stand."""

import asyncio
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.fakes import execute

BODIES = {
    "assignment": "x = (outer * 2).save()",
    "annotated": "x: int = (outer + 1).save()",
    "tuple pairwise": "x, y = (outer + 1).save(), (outer + 2).save()",
    "tuple taken apart": "x, (y, *z) = (1, (2, 3, 4)).save()",
    "nested targets": "(x, y), z = (1 .save(), 2), [3].save()",
    "chained": "x = y = [outer].save()",
    "chained with a tuple": "(x, y) = z = (outer, 2).save()",
    "walrus": "if (x := (outer > 1).save()):\n    y = 'big'.save()",
    "bare": "x = outer\nx += 1\nx.save()",
    "bare of an outside name": "outer.save()",
    "two bare": "x, y = 1, 2\nx.save(), y.save()",
    "either": "x = 1 .save() if outer > 1 else 2 .save()",
    "none": "x = None\nx.save()",
    "list that grows": "x = list().save()\nfor i in range(3):\n    x.append(i * outer)",
    "in a loop": "for i in range(3):\n    x = (i + outer).save()",
    "while with break": "x = 0\nwhile True:\n    x += 1\n    if x > outer:\n        break\n    else:\n        continue\nx.save()",
    "for with else": "for i in range(2):\n    pass\nelse:\n    x = i.save()",
    "rebinds an outside name": "outer = outer + 1\nouter.save()",
    "adds to an outside number": "outer += 5\nx = outer.save()",
    "reads, then binds": "x = outer.save()\nouter = 3",
    "binds on one way only": "if flag:\n    outer = 7\nx = outer.save()",
    "binds in a try": "try:\n    outer = missing_name\nexcept NameError as error:\n    x = str(error).save()\ny = outer.save()",
    "binds in finally": "try:\n    x = 1\nfinally:\n    x = (x + outer).save()",
    "try with else": "try:\n    x = 1\nexcept ValueError:\n    x = 2\nelse:\n    x = outer\nx.save()",
    "deletes": "x = 1\ndel x\nx = outer.save()",
    "comprehensions": "x = [a * outer for a in range(3) if a].save()\ny = {a: outer for a in 'ab'}.save()\nz = {a for a in 'a'}.save()",
    "nested comprehension": "x = [[outer + a + b for a in range(b)] for b in range(3)].save()",
    "walrus in a comprehension": "x = [(y := a) for a in range(3)].save()\ny.save()",
    "generator": "x = sum(a * outer for a in range(4)).save()",
    "lambda": "double = lambda a, b=outer: a * b + outer\nx = double(3).save()",
    "inner function": "def add(a, *rest, b=outer, **more):\n    c = a + b + outer\n    return c\nx = add(1).save()",
    "recursive function": "def fact(n):\n    return 1 if n < 2 else n * fact(n - 1)\nx = fact(5).save()",
    "generator function": "def count():\n    yield from range(outer)\n    return\nx = list(count()).save()",
    "function before its variable": "def get():\n    return later\nlater = outer\nx = get().save()",
    "decorated": "@twice\ndef f():\n    return outer\nx = f().save()",
    "decorated first, at the top": "@twice\ndef f(): return 3\nx = f().save()",
    "inner class": "class A:\n    value = outer\n    def get(self):\n        return self.value + outer\nx = A().get().save()",
    "class later": "y = 1\nclass A:\n    def get(self):\n        return 5\nx = A().get().save()",
    "class with private names": "class A:\n    __p = 3\n    def get(self):\n        return self.__p\nx = A().get().save()",
    "inner with": "with nullcontext(outer) as x, nullcontext(2) as y:\n    z = (x + y).save()\nx.save()",
    "f-string": "x = f'{outer!r:>{outer + 3}} {outer=}'.save()",
    "multi-line string": 'x = """a\n  b\nc""".save()',
    "docstring first": '"""words"""\nx = outer.save()',
    "import": "import math as m, os.path\nfrom math import pi\nx = m.floor(pi).save()\ny = os.path.join('a', 'b').save()",
    "match": "match [outer, 2, {'k': 1, 'l': 2}]:\n    case [a, *rest] if a > 0:\n        x = (a, rest).save()\n    case _:\n        x = 0 .save()",
    "match mapping": "match {'k': 1, 'l': 2}:\n    case {'k': a, **rest}:\n        x = (a, rest).save()",
    "assert": "assert outer > 0, 'no'\nx = outer.save()",
    "star arguments": "x = dict(*[[('a', outer)]], **{'b': 2}).save()",
    "slices": "x = list(range(9))\nx[2:5] = [outer]\nx.save()",
    "augmented parts": "x = [1, 2]\nx[0] += outer\nx += [3]\nx.save()",
    "conditional first binding": "for i in range(3):\n    if i == 0:\n        x = list().save()\n    x.append(i)",
    "nonlocal in a function": "n = 0\ndef up():\n    nonlocal n\n    n += outer\nup()\nn.save()",
    "global lookup": "x = helper(outer).save()",
    "semicolons": "x = 1; y = (x + outer).save()",
    "comment first": "# nothing\n\nx = outer.save()",
    "continued lines": "x = (outer +\n     1).save(\n)",
    "raises and catches": "x = []\ntry:\n    x.append(1 / (outer - outer))\nexcept ZeroDivisionError:\n    x.append('caught')\nx.save()",
    "pass only": "pass",
    "a method called save with arguments": "x = keeper.save('path').save()",
}

PLACES = {
    "module": "outer = 3\nflag = False\n{with_body}\nresult = dict(locals())",
    "function": "def f(outer, flag):\n{in_function}\n    return dict(locals())\nresult = f(3, False)",
    "closure": "def g():\n  outer = 3\n  flag = False\n  def f():\n    nonlocal outer\n    flag\n{in_function}\n    return dict(locals())\n  return f()\nresult = g()",
    "method": "class C:\n  def f(self, outer, flag):\n{in_function}\n    del self\n    return dict(locals())\nresult = C().f(3, False)",
    "class": "class C:\n    outer = 3\n    flag = False\n{in_function}\nresult = dict(vars(C))",
    "async": "async def f(outer, flag):\n{in_function}\n    return dict(locals())\nresult = asyncio.run(f(3, False))",
    "generator": "def f(outer, flag):\n{in_function}\n    yield dict(locals())\nresult = next(f(3, False))",
    "in a finally": "def f(outer, flag):\n    try:\n        pass\n    finally:\n{deeper}\n    return dict(locals())\nresult = f(3, False)",
}
ONLY_IN_FUNCTIONS = {"nonlocal in a function"}
# A class's own names are not seen by functions and comprehensions inside it; the lifted body is kinder there.
NOT_IN_A_CLASS = {
    "comprehensions", "nested comprehension", "walrus in a comprehension", "generator", "lambda", "inner function",
    "recursive function", "generator function", "function before its variable", "decorated", "inner class",
}  # fmt: skip


TELLING = (  # of what differs between places: where names live, and how a body begins and ends
    "tuple pairwise", "rebinds an outside name", "binds on one way only", "binds in a try", "binds in finally",
    "comprehensions", "lambda", "recursive function", "inner class", "inner with", "docstring first", "pass only",
)  # fmt: skip


class Keeper:
    def save(self, path: str) -> str:
        return f"wrote {path}"


def helper(x: int) -> int:
    return x * 10


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda: function() * 2


NAMES = {"helper": helper, "twice": twice, "keeper": Keeper(), "nullcontext": nullcontext, "asyncio": asyncio}


def written(place: str, body: str, header: str = "with Trace() as t:") -> str:
    """`body` under a `with`, in one of the places."""
    block = f"{header}\n{textwrap.indent(body, '    ')}"
    return PLACES[place].format(
        with_body=block, in_function=textwrap.indent(block, "    "), deeper=textwrap.indent(block, "        ")
    )


def cases() -> list[Any]:
    pairs = [(place, name) for place in PLACES for name in (BODIES if place in ("module", "closure") else TELLING)]
    skipped = {(p, n) for p in ("module", "class") for n in ONLY_IN_FUNCTIONS} | {("class", n) for n in NOT_IN_A_CLASS}
    return [pytest.param(place, name, id=f"{place}-{name}") for place, name in pairs if (place, name) not in skipped]


@pytest.mark.parametrize(("place", "name"), cases())
def test_a_lifted_body_binds_what_running_it_would_bind(place: str, name: str) -> None:
    body = BODIES[name]
    plain = body.replace(".save(\n)", "").replace(".save()", "")
    expected = execute(written(place, plain, "if True:"), **NAMES)["result"]
    lifted = execute(written(place, body), **NAMES)["result"]
    trace = lifted.pop("t")
    assert {name: lifted[name] for name in trace.saved} == {name: expected[name] for name in trace.saved}
    assert list(trace.saved) or name in ("pass only",)
    assert set(trace.saved) == set(trace.block.saved_names)


@pytest.mark.parametrize("place", PLACES)
def test_names_that_are_not_saved_stay_as_they_were(place: str) -> None:
    result = execute(written(place, "outer = outer + 1\nlost = 2\nx = outer.save()"), **NAMES)["result"]
    assert (result["outer"], result["x"]) == (3, 4)
    assert "lost" not in result


atoms = st.sampled_from(["outer", "x", "y", "1", "len(str(outer))"])
expressions = st.recursive(
    atoms, lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner), max_leaves=4
)
simple = st.one_of(
    st.builds("{} = {}".format, st.sampled_from(["x", "y", "outer"]), expressions),
    st.builds("{} += {}".format, st.sampled_from(["x", "y", "outer"]), expressions),
    st.builds("x, y = {}, {}".format, expressions, expressions),
    st.builds("y = sum({} + i for i in range(2))".format, expressions),
    st.builds("y = (lambda outer: {})(2)".format, expressions),
)


def blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements inside of statements."""
    indented = inner.map(lambda text: textwrap.indent(text, "    "))
    return st.one_of(
        st.builds("if {} % 2:\n{}\nelse:\n{}".format, expressions, indented, indented),
        st.builds("for x in range(2):\n{}".format, indented),
        st.builds("try:\n{}\nexcept NameError:\n{}\nfinally:\n    pass".format, indented, indented),
        st.builds("with nullcontext():\n{}".format, indented),
        st.lists(inner, min_size=1, max_size=3).map("\n".join),
    )


@settings(max_examples=60, deadline=None)
@given(body=st.recursive(simple, blocks, max_leaves=5), place=st.sampled_from(["module", "function", "closure"]))
def test_any_body_computes_what_running_it_would_compute(body: str, place: str) -> None:
    end = "\nresults = [x, y, outer]"
    start = "x, y = 5, 7\n"
    expected = execute(written(place, start + body + end, "if True:"), **NAMES)["result"]["results"]
    lifted = execute(written(place, start + body + end + "\nresults.save()"), **NAMES)["result"]["results"]
    assert lifted == expected
