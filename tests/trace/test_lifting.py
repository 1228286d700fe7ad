"""A lifted body does what the same statements do where they stand."""

import asyncio
import re
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.bodies import BODIES, PLACES
from tests.trace.fakes import execute

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
    return re.sub(r"^( *)\{block\}$", lambda mark: textwrap.indent(block, mark[1]), PLACES[place], flags=re.MULTILINE)


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


@settings(max_examples=60)
@given(body=st.recursive(simple, blocks, max_leaves=5), place=st.sampled_from(["module", "function", "closure"]))
def test_any_body_computes_what_running_it_would_compute(body: str, place: str) -> None:
    end = "\nresults = [x, y, outer]"
    start = "x, y = 5, 7\n"
    expected = execute(written(place, start + body + end, "if True:"), **NAMES)["result"]["results"]
    lifted = execute(written(place, start + body + end + "\nresults.save(), outer.save()"), **NAMES)["result"][
        "results"
    ]
    assert lifted == expected
