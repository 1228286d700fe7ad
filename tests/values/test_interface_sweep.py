"""AttentionFuser over every attention class of the installed transformers, and over every model of the zoo as it runs.

python -m pytest tests/values/test_interface_sweep.py -s      # prints the table that `report` makes
"""

import ast
import functools
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import AttentionInterface

from jackfield.values.interface import POSITIONS, TABLE, AttentionFuser, argument, mismatch
from tests import zoo

# Some files of transformers compile functions when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

OWN_ATTENTION = {"bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt"}
"""Families of the zoo that do their own softmax, or call a fused attention of torch themselves."""

OWN_BRANCH = {"gpt2/upcast"}
"""Models that call the interface in their source, and take another branch as they are configured here."""


# --- every class of the library -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One class: how often its forward calls the interface, the scales it passes, and why it is no match."""

    family: str
    name: str
    calls: int
    scales: tuple[str, ...]
    reason: str | None


@functools.cache
def findings() -> tuple[Finding, ...]:
    """One per class that has the interface in its text, or that is called attention."""
    return tuple(finding(cls) for cls in attention_classes())


def finding(cls: type[nn.Module]) -> Finding:
    fusers = AttentionFuser.match_all(cls.__new__(cls))  # its source is all that is asked for
    scales = ["-" if fuser.scale_expr is None else ast.unparse(fuser.scale_expr) for fuser in fusers]
    return Finding(cls.__module__.split(".")[-2], cls.__name__, len(fusers), tuple(scales), mismatch(cls))


def attention_classes() -> Iterator[type[nn.Module]]:
    for path, texts in class_texts().items():
        names = [name for name, text in texts.items() if TABLE in text or name.endswith("Attention")]
        file = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}") if names else None
        classes = (getattr(file, name) for name in names)
        yield from (cls for cls in classes if issubclass(cls, nn.Module))


@functools.cache
def class_texts() -> dict[Path, dict[str, str]]:
    """The text of every class in the modelling files of transformers, without importing them."""
    files = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
    return {path: dict(re.findall(r"^class (\w+)(.*?)(?=^\S|\Z)", path.read_text(), re.M | re.S)) for path in files}


def report() -> str:
    """The table of all findings, the classes that are no match last."""
    rows = sorted(findings(), key=lambda row: (row.reason or "", row.family, row.name))
    lines = [f"{r.family:28}{r.name:44}{r.calls}  {r.reason or ', '.join(r.scales)}" for r in rows]
    counts = Counter(row.calls for row in rows)
    summary = ", ".join(f"{count} classes with {calls} calls" for calls, count in sorted(counts.items()))
    return "\n".join([*lines, summary])


@pytest.mark.slow
def test_the_attention_classes_of_transformers_are_matched():
    print(report())
    counts = Counter(found.calls for found in findings())
    assert counts[1] >= 380  # 388 in transformers 5.19, 29 with two calls, one with three
    assert sum(count for calls, count in counts.items() if calls > 1) <= 40
    assert all((found.reason is None) == (found.calls == 1) for found in findings())
    assert not [found for found in findings() if found.reason and "cannot be read" in found.reason]


@pytest.mark.slow
def test_every_class_that_has_the_interface_in_its_text_makes_a_call():
    found = {(row.family, row.name) for row in findings() if row.calls}
    used = re.compile(rf"{TABLE}[.\[,]")  # not in a comment
    texts = [(path.parent.name, name, text) for path, own in class_texts().items() for name, text in own.items()]
    assert found == {(family, name) for family, name, text in texts if used.search(text)}


@pytest.mark.slow
def test_nearly_every_scale_is_an_expression_of_the_module():
    """What the resolver has to know; another form appearing in a release is looked at before it is trusted."""
    forms = Counter(scale for found in findings() for scale in found.scales)
    known = {"self.scaling", "self.scale", "1.0", "None", "self.head_dim ** (-0.5)", "scale", "-"}
    assert set(forms) <= known
    assert forms["self.scaling"] + forms["self.scale"] >= 0.95 * sum(forms.values())


# --- every model of the zoo, as it runs -----------------------------------------------------------------------------


Passed = dict[str, Any]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> dict[nn.Module, list[Passed]]:
    """What each module passes to the interface, call by call, from now on."""
    recorded: dict[nn.Module, list[Passed]] = {}
    get_interface = AttentionInterface.get_interface

    def get_recorder(table: AttentionInterface, *names: Any, **options: Any) -> Any:
        attend = get_interface(table, *names, **options)

        def record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            recorded.setdefault(module, []).append(dict(zip(POSITIONS[1:], args, strict=False)) | kwargs)
            return attend(module, *args, **kwargs)

        return record

    monkeypatch.setattr(AttentionInterface, "get_interface", get_recorder)
    return recorded


def fusers_of(model: nn.Module) -> dict[nn.Module, tuple[AttentionFuser, ...]]:
    found = {module: AttentionFuser.match_all(module) for module in model.modules()}
    return {module: fusers for module, fusers in found.items() if fusers}


def run(name: str) -> transformers.PreTrainedModel:
    model = zoo.build(name)
    with torch.no_grad():
        model(zoo.prompt(name, 12), use_cache=False)
    return model


def differences(module: nn.Module, fuser: AttentionFuser, call: Passed) -> list[str]:
    """What the fuser says of a module and the call does not bear out."""
    same = {
        "scale": fuser.scale(module) == call.get("scaling"),
        "window": fuser.window(module) == call.get("sliding_window"),
        "softcap": fuser.softcap(module) == call.get("softcap"),
        "sinks": fuser.sinks(module) is call.get("s_aux"),
    }
    return [what for what, equal in same.items() if not equal]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_resolves_is_what_the_model_passes(name: str, passed: dict[nn.Module, list[Passed]]):
    model = run(name)
    fusers = fusers_of(model)
    assert bool(fusers) == (zoo.family(name) not in OWN_ATTENTION)
    assert set(passed) == (set() if name in OWN_BRANCH else set(fusers))
    for module, calls in passed.items():
        assert len(calls) == len(fusers[module])
        for fuser, call in zip(fusers[module], calls, strict=True):
            assert differences(module, fuser, call) == []


@pytest.mark.parametrize("name", [name for name in zoo.NAMES if zoo.family(name) not in OWN_ATTENTION])
def test_every_module_that_dispatches_knows_its_layer_and_its_config(name: str):
    model = zoo.build(name)
    fusers = fusers_of(model)
    indices = [found[0].layer_index(module) for module, found in fusers.items()]
    assert indices == sorted(set(indices))
    assert all(fuser.validate(module, model.config) for module, found in fusers.items() for fuser in found)


def test_two_calls_in_one_forward_are_each_addressable(passed: dict[nn.Module, list[Passed]]):
    model = run("diffllama")
    for module, fusers in fusers_of(model).items():
        assert AttentionFuser.match(None, module) is None
        assert [fuser.index for fuser in fusers] == [0, 1]
        assert [fuser.scale(module) for fuser in fusers] == [call["scaling"] for call in passed[module]]
        names = [ast.unparse(argument(fuser.call, "value")) for fuser in fusers]
        assert names == ["value_states1", "value_states2"]


MUTANTS = {
    "a scale of one over the root of the head width": ("gemma2", "scale_expr", "self.head_dim ** -0.5", "scale"),
    "a scale that was applied before": ("opt", "scale_expr", "self.head_dim ** -0.5", "scale"),
    "a scale for every layer": ("gpt2/inv", "scale_expr", "self.head_dim ** -0.5", "scale"),
    "no scale": ("llama", "scale_expr", "None", "scale"),
    "no sinks": ("gpt_oss", "s_aux_expr", "None", "sinks"),
    "a copy of the sinks": ("gpt_oss", "s_aux_expr", "self.sinks + 0", "sinks"),
}


@pytest.mark.parametrize(("name", "field", "expression", "what"), MUTANTS.values(), ids=MUTANTS)
def test_the_comparison_sees(name: str, field: str, expression: str, what: str, passed: dict[nn.Module, list[Passed]]):
    mutant = ast.parse(expression, mode="eval").body
    module, fusers = list(fusers_of(run(name)).items())[-1]
    assert differences(module, replace(fusers[0], **{field: mutant}), passed[module][0]) == [what]


def test_the_comparison_sees_a_window_and_a_soft_cap_left_out(passed: dict[nn.Module, list[Passed]]):
    module, fusers = next(iter(fusers_of(run("gemma2")).items()))
    assert differences(module, replace(fusers[0], call=None), passed[module][0]) == ["window", "softcap"]
