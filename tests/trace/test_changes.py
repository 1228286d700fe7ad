from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.errors import UnboundSave
from tests.trace.fakes import Part, execute


def outside() -> dict[str, Any]:
    part = Part()
    return {
        "acts": [[]], "table": {"a": [1]}, "seen": {1}, "queue": deque(), "grid": torch.zeros(3, 3),
        "array": np.zeros(3),
        "thing": SimpleNamespace(rows=[], layer=part), "layer": part, "layers": [part, part], "named": {"a": part},
        "number": 3, "text": "a", "pair": (1, 2), "vector": torch.ones(2),
    }  # fmt: skip


REFUSED = [
    "acts.append(1)",
    "acts[0].append(1)",
    "acts[i].append(1)",
    "acts[0] = 1",
    "acts += [1]",
    "acts.extend([1])",
    "del acts[0]",
    "table['b'] = 1",
    "table.update(b=1)",
    "table['a'].append(2)",
    "seen.add(2)",
    "table.setdefault('c', 1)",
    "seen |= {2}",
    "queue.append(1)",
    "grid[0] = 1",
    "grid[0, 1] += 1",
    "grid[0][1] = 2",
    "grid.add_(1)",
    "grid[0].zero_()",
    "grid += 1",
    "array[0] = 1",
    "array += 1",
    "number += 1",
    "text += 'b'",
    "pair += (3,)",
    "thing.rows.append(1)",
    "thing.rows = []",
    "thing.rows += [1]",
    "for acts[0] in range(2): pass",
    "acts[0], x = 1, 2",
    "if i: acts.append(1)",
    "[acts.append(a) for a in range(2)]",
    "f = lambda: acts.append(1)",
]


@pytest.mark.parametrize("statement", REFUSED)
def test_a_change_of_an_outside_object_is_refused(statement: str) -> None:
    name = next(name for name in outside() if statement.replace("f = lambda: ", "").lstrip("[").find(name) >= 0)
    with pytest.raises(UnboundSave, match=rf"<written \d+>:4: .*changes '{name}'.*{name} = .*\.save\(\)"):
        execute(f"i = 0\nwith Trace() as t:\n    x = 1\n    {statement}", **outside())


ALLOWED = [
    "layer.layer_output = 1",
    "layer.layer_output[0] += 1",
    "layer.layer_output[:] = [2]",
    "layers[0].layer_output = 1",
    "layers[i].layer_output[0] = 1",
    "named['a'].layer_output = 1",
    "thing.layer.layer_output = 1",
    "number = number + 1",
    "vector = vector + 1",
    "acts = []\n    acts.append(1)",
    "acts = list(acts)\n    acts[0] = 1",
    "if i:\n        acts = []\n    else:\n        acts = []\n    acts.append(1)",
    "acts.append(1)\n    acts.save()",
    "f = lambda acts: acts.append(1)\n    f([])",
    "vector.requires_grad_()",
    "y = sorted(acts)\n    y.sort()",
    "list(acts).append(1)",
    "torch.add(vector, 1)",
    "text.join(['a'])",
    "x = [acts for acts in [[1]] if acts.append(2)]",
    "import operator\n    operator.add(1, 2)",
    "def f(acts):\n        acts.append(1)\n    f([])",
    "with open_list() as acts:\n        acts.append(1)",
]


@pytest.mark.parametrize("statement", ALLOWED)
def test_a_change_of_the_blocks_own_or_of_the_model_is_not(statement: str) -> None:
    names = outside()
    execute(f"import torch\ni = 1\nwith Trace() as t:\n    x = 1\n    {statement}", open_list=open_list, **names)
    assert names["acts"] == [[]]
    assert names["vector"].tolist() == [1, 1]


class open_list:  # noqa: N801
    def __enter__(self) -> list[int]:
        return []

    def __exit__(self, *error: object) -> None: ...


def test_a_changed_copy_is_kept_where_it_is_saved() -> None:
    acts = [1]
    module = execute("with Trace() as t:\n    acts.append(2)\n    acts.save()", acts=acts)
    assert (module["acts"], acts) == ([1, 2], [1])


def test_looking_for_changes_runs_no_property() -> None:
    class Lazy:
        @property
        def rows(self) -> list[int]:
            raise AssertionError("ran")

    execute("with Trace() as t:\n    if False:\n        lazy.rows.append(1)", lazy=Lazy())
