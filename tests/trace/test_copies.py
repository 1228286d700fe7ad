import functools
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from jackfield.errors import TracingError
from jackfield.trace.copies import Outside, copy_outside
from tests.trace.fakes import Part, execute


def copied(device: str | None = None, **values: object) -> dict[str, object]:
    made = copy_outside({Outside("global", name): value for name, value in values.items()}, device)
    return {place.name: value for place, value in made.items()}


@dataclass
class Pair:
    left: object
    right: object


def test_aliases_stay_aliases_and_nothing_is_shared() -> None:
    rows, x = [1], torch.ones(2)
    made = copied(a=rows, b={"rows": rows, "x": x}, c=Pair(x, rows))
    assert made["a"] is made["b"]["rows"] is made["c"].right
    assert made["b"]["x"] is made["c"].left
    assert made["a"] is not rows
    made["c"].left.zero_()
    assert x.tolist() == [1, 1]


def test_cycles_are_copied() -> None:
    loop: list[object] = []
    loop.append(loop)
    made = copied(loop=loop)["loop"]
    assert made[0] is made
    assert made is not loop


def test_tensors_keep_dtype_and_go_to_the_device_at_any_depth() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    made = copied("meta", x=x, deep=[Pair({"x": x}, None)])
    assert (made["x"].device.type, made["x"].dtype) == ("meta", torch.bfloat16)
    assert made["deep"][0].left["x"] is made["x"]


def test_gradients_leaf_other_and_modules() -> None:
    leaf = torch.ones(2, requires_grad=True)
    layer = torch.nn.Linear(2, 2)
    tied = torch.nn.Sequential(layer, layer)
    made = copied(leaf=leaf, other=leaf * 2, tied=tied, weight=layer.weight)
    assert made["leaf"].requires_grad
    assert not made["other"].requires_grad
    assert made["other"].tolist() == [2, 2]
    assert made["tied"][0].weight is made["tied"][1].weight is made["weight"]
    assert isinstance(made["weight"], torch.nn.Parameter)
    assert made["weight"] is not layer.weight
    assert torch.equal(made["tied"](torch.ones(2)), tied(torch.ones(2)))


def test_a_generator_goes_on_from_where_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    made = copied(generator=generator)["generator"]
    assert torch.equal(torch.rand(2, generator=made), torch.rand(2, generator=generator))


def helper() -> None: ...


KEPT = {"part": Part(), "module": threading, "class": Part, "function": helper, "lambda": lambda: 1, "builtin": len}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays_itself(name: str) -> None:
    assert copied(x=KEPT[name])["x"] is KEPT[name]
    assert copied(x=[{"y": KEPT[name]}])["x"][0]["y"] is KEPT[name]


def test_loaded_models_and_tokenizers_stay_themselves() -> None:
    base = type("PreTrainedModel", (torch.nn.Module,), {"__module__": "transformers.modeling_utils"})
    model = type("Mine", (base,), {})()
    assert copied(x=[model])["x"][0] is model


def test_methods_and_partials_take_their_objects_along() -> None:
    pair = Pair([1], None)
    made = copied(pair=pair, method=pair.left.index, bound=Method(pair).get, partial=functools.partial(helper, pair))
    assert made["bound"]() is made["pair"]
    assert made["partial"].args[0] is made["pair"]


class Method:
    def __init__(self, value: object) -> None:
        self.value = value

    def get(self) -> object:
        return self.value


def test_a_class_defined_in_a_function_is_no_obstacle() -> None:
    class Local:
        def __init__(self) -> None:
            self.rows = [1]

    made = copied(x=Local())["x"]
    assert type(made) is Local
    assert made.rows == [1]


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file:
        for value in (threading.Lock(), file, (x for x in [1])):
            with pytest.raises(TracingError, match=r"uses 'bad' from outside.*Make it inside the block"):
                copied(good=1, bad=[value])


def test_only_names_that_are_used_are_copied() -> None:
    module = execute(
        """
        lock = bad()
        def f():
            rows = bad()          # what an earlier trace left under the name
            with Trace() as t:
                rows = list().save()
                rows.append(1)
            return rows
        result = f()
        """,
        bad=threading.Lock,
    )
    assert module["result"] == [1]


def test_a_lifted_block_names_what_it_cannot_copy() -> None:
    with pytest.raises(TracingError, match="'lock'"):
        execute("with Trace() as t:\n    x = lock.locked().save()", lock=threading.Lock())
