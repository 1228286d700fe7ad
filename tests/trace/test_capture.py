# ruff: noqa: C408, RET504 - the spellings of a save are what is tested
import functools
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from jackfield.errors import NoSource, TracingError, UnboundSave
from jackfield.trace.capture import Block
from tests.trace.fakes import Part, Trace, execute, run

limit = [1]
never = False
weights = torch.ones(2)


def plain(model: Any, t: Any) -> Any:
    t.save(a=model)
    return limit


def saving(model: Any, t: Any) -> int:
    x = (model + limit[0]).save()
    rows = list().save()
    for i in range(2):
        rows.append(i)
    a, b = 1, 2
    a.save()
    c, d = (a, b).save()
    return x + c + d


def test_a_function_is_run_with_model_and_t_on_copies() -> None:
    saved, returned = run(Block.from_function(plain), "model")
    assert saved == {"a": "model"}
    assert returned == limit
    assert returned is not limit


def test_the_save_spellings_work_in_a_function_too() -> None:
    block = Block.from_function(saving)
    saved, returned = run(block, 4)
    assert saved == {"x": 5, "rows": [0, 1], "a": 1, "c": 1, "d": 2}
    assert returned == 8
    assert block.saved_names == ("x", "rows", "a", "c", "d")
    assert block.origin == f"{__file__}:{saving.__code__.co_firstlineno}"


def decorated(function: Any) -> Any:
    return function


class Study:
    bias = 2

    def __init__(self) -> None:
        self.__hidden = 5

    def block(self, model: Any, t: Any) -> int:
        x = (self.__hidden + self.bias + model).save()
        return x

    def __call__(self, model: Any, t: Any) -> int:
        x = (self.bias + model).save()
        return x

    @staticmethod
    @decorated
    def static(model: Any, t: Any, *, more: int = 3) -> int:
        x = (model + more).save()
        return x


def closing(k: int) -> Any:
    def block(model: Any, t: Any, extra: int = k) -> int:
        x = (model + k + extra).save()
        return x

    return block


def partial_of(model: Any, t: Any, add: int = 0) -> int:
    x = (model + add).save()
    return x


def with_first(first: Any, model: Any, t: Any) -> Any:
    return first, model


FUNCTIONS = {
    "method": (Study().block, 10),
    "static method": (Study.static, 6),
    "closure": (closing(2), 7),
    "partial": (functools.partial(partial_of, add=4), 7),
    "partial of partial": (functools.partial(functools.partial(partial_of), add=4), 7),
    "lambda": (lambda model, t: (_x := (model + 1).save()), 4),
    "lambda with a default": (lambda model, t, f=lambda a: a + 1: (_x := f(model).save()), 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kinds_of_functions(name: str) -> None:
    function, expected = FUNCTIONS[name]
    saved, returned = run(Block.from_function(function), 3)
    assert (list(saved.values()), returned) == ([expected], expected)


def test_an_object_that_can_be_called_and_arguments_in_front() -> None:
    assert run(Block.from_function(Study()), 3) == ({"x": 5}, 5)
    assert run(Block.from_function(functools.partial(with_first, "a")), 3)[1] == ("a", 3)


@pytest.mark.parametrize("function", [len, 3, "text"])
def test_what_is_no_function_is_refused(function: Any) -> None:
    with pytest.raises(TracingError, match=r"block\(model, t\)"):
        Block.from_function(function)


def test_generators_and_coroutines_are_refused() -> None:
    async def later(model: Any, t: Any) -> None: ...

    def yielding(model: Any, t: Any) -> Any:
        yield

    for function in (later, yielding):
        with pytest.raises(TracingError, match="plain function"):
            Block.from_function(function)


def without_text(text: str) -> Any:
    module: dict[str, Any] = {}
    exec(text, module)
    return module["f"]


def test_without_a_text_only_the_rewriting_is_missing() -> None:
    block = Block.from_function(without_text("def f(model, t):\n    t.save(x=model)\n    model.save('path', t)"))
    model = SimpleNamespace(save=lambda path, t: None)
    assert run(block, model)[0]["x"] is model
    with pytest.raises(NoSource, match=r"t\.save\(name=value\)"):
        Block.from_function(without_text("def f(model, t):\n    x = model.save()"))


def test_saves_and_changes_that_would_be_lost_are_refused_in_functions() -> None:
    count = 0

    def returns(model: Any, t: Any) -> Any:
        return model.save()

    def appends(model: Any, t: Any) -> None:
        limit.append(model)

    def counts(model: Any, t: Any) -> None:
        nonlocal count
        count += 1

    for function, message in ((returns, "binds to no name"), (appends, "changes 'limit'"), (counts, "assigns 'count'")):
        with pytest.raises(UnboundSave, match=message):
            Block.from_function(function)


def test_a_function_in_a_block_assigns_what_is_the_blocks_own_alone() -> None:
    count = 0

    def counts(model: Any, t: Any) -> None:
        def add() -> None:
            nonlocal count
            count += 1

        add()

    def declares(model: Any, t: Any) -> None:
        def assign() -> None:
            global assigned
            assigned = 1

        assign()

    def own(model: Any, t: Any) -> int:
        number = count

        def add() -> None:
            nonlocal number
            number += 1

        def other() -> int:
            count = 5

            def add() -> None:
                nonlocal count
                count += 1

            add()
            return count

        add()
        return number + other()

    for function, message in ((counts, "assigns 'count'"), (declares, "assigns 'assigned'")):
        with pytest.raises(UnboundSave, match=message):
            Block.from_function(function)
    assert run(Block.from_function(own))[1] == 7


def test_each_binding_starts_afresh() -> None:
    rows: list[int] = []

    def block(model: Any, t: Any) -> list[int]:
        fill(rows)
        return rows

    taken = Block.from_function(block)
    assert [run(taken)[1] for _ in range(2)] == [[1], [1]]
    assert rows == []


def fill(rows: list[int]) -> None:
    rows.append(1)


def test_lifted_copies_are_fresh_and_on_the_device() -> None:
    with Trace() as t:
        x = (weights * 1).save()
    bound = [t.block.bind(Collect(), "meta") for _ in range(2)]
    assert torch.equal(x, weights)
    first, second = (function.func.__globals__["weights"] for function in bound)
    assert first is not second
    assert first.device.type == "meta"


class Collect:
    def save(self, **named: Any) -> None: ...


def test_a_helper_brings_its_own_globals() -> None:
    helpers = execute("factor = 3\ndef scale(x):\n    return x * factor")
    scale = helpers["scale"]
    factor = 100
    with Trace() as t:
        x = scale(factor).save()
    assert x == 300
    assert t.saved == {"x": 300}


# -- what a block speaks of


def reads_scores(layer: Any) -> Any:
    return inner_helper(layer.attention_scores)


def inner_helper(x: Any) -> Any:
    return x.read("router_logits")


class Reader:
    def look(self, layer: Any) -> Any:
        return layer.mlp_activations


def closure_reader() -> Any:
    deep = reads_scores
    return lambda layer: deep(layer)


def test_names_reach_into_the_users_own_functions() -> None:
    reader, partial, table, closed = Reader(), functools.partial(reads_scores), {"f": inner_helper}, closure_reader()
    with Trace() as t:
        f = lambda layer: layer.layer_mid  # noqa: E731, F841
        if never:
            x = reader.look(None).layer_output  # noqa: F841
    assert {"layer_mid", "layer_output", "look", "mlp_activations"} <= t.block.names
    for value in (partial, closed, reads_scores):
        with Trace() as t:
            if never:
                value(None)
        assert {"attention_scores", "router_logits"} <= t.block.names
    with Trace() as t:
        if never:
            table["f"](None)
    assert "router_logits" in t.block.names


def test_names_do_not_reach_into_installed_packages() -> None:
    with Trace() as t:
        x = torch.nn.functional.softmax(weights, -1).save()
        y = itertools.chain([1]).save()
    assert {"softmax", "chain"} <= t.block.names
    assert "_stacklevel" not in t.block.names
    assert (len(x), list(y)) == (2, [1])


def test_a_block_travels_by_value() -> None:
    part = Part()
    scale = 3
    with Trace() as t:
        x = (weights * scale).sum().item().save()
        if never:
            part.layer_output = 0
    sent = pickle.loads(cloudpickle.dumps(t.block))
    assert sent.names == t.block.names
    assert run(sent)[0] == {"x": x} == {"x": 6.0}
    for function in (saving, closing(2)):
        sent = pickle.loads(cloudpickle.dumps(Block.from_function(function)))
        assert run(sent, 4)[0]["x"] == run(Block.from_function(function), 4)[0]["x"]


def test_entering_again_does_not_read_the_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append("compiled")
        return compile(*arguments, **named)

    monkeypatch.setattr("jackfield.trace.compiling.compile", counting, raising=False)
    counts = []
    for i in range(3):
        with Trace() as t:
            x = (i + 1).save()
        counts.append(len(calls))
    assert (x, t.saved) == (3, {"x": 3})
    assert counts[0] == counts[1] == counts[2] > 0
