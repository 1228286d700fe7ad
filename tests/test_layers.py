"""The order of the layers, held by reading every import of `src/`, and the public names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jackfield

SOURCE = Path(jackfield.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

# From the top down: a module may import from its own row and from rows below it.
ROWS = (
    ("__init__", "__main__", "vllm_worker"),
    ("cli",),
    ("plots",),
    ("model", "session"),
    ("harvest",),
    ("engines",),
    ("values", "interventions"),
    ("trace",),
    ("interleave",),
    ("errors", "axes", "settings", "version"),
)
# Plots take arrays: they may not know what a model is, though the rows would let them.
APART = {("plots", "model"), ("plots", "session"), ("plots", "engines")}
# Module names of one family or another. The native Llama's checkpoints are one family's own files.
FAMILY_NAMES = frozenset(
    [
        "c_attn",
        "c_fc",
        "c_proj",
        "down_proj",
        "embed_tokens",
        "gate_proj",
        "input_layernorm",
        "k_proj",
        "lm_head",
        "o_proj",
        "out_proj",
        "post_attention_layernorm",
        "q_proj",
        "query_key_value",
        "self_attn",
        "self_attention",
        "up_proj",
        "v_proj",
        "wte",
    ]
)
NAMED_IN = ("values/families/", "engines/llama/")
ROW = {name: number for number, row in enumerate(ROWS) for name in row}


def part(dotted: str) -> str:
    """The part of jackfield that a module belongs to: `jackfield.values.layer` is of `values`."""
    pieces = dotted.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in ROW else "__init__"


def imports(text: str, package: str = "jackfield") -> Iterator[str]:
    """Every module that the text imports, wherever in it, as dotted names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package.rsplit(".", node.level - 1)[0]
            yield f"{base}.{node.module}" if node.module else base
        elif isinstance(node, ast.ImportFrom) and node.module == "jackfield":
            yield from (f"jackfield.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def forbidden(file: str, text: str) -> list[str]:
    """What `file` imports and may not."""
    module = "jackfield." + file.removesuffix(".py").replace("/", ".")
    own = part(module)
    found: list[str] = []
    for name in imports(text, module.rsplit(".", 1)[0]):
        root = name.split(".")[0]
        other = part(name)
        if (root == "vllm" and not file.startswith("engines/vllm/")) or (
            root == "jackfield" and (ROW[other] < ROW[own] or (own, other) in APART)
        ):
            found.append(name)
    return found


def family_names(text: str) -> list[str]:
    """Strings in `text`, docstrings aside, that are a path of module names which a family has."""
    tree = ast.parse(text)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in strings if id(node) not in said and set(node.value.split(".")) & FAMILY_NAMES]


@pytest.mark.parametrize("file", FILES)
def test_imports_point_downward(file):
    assert forbidden(file, (SOURCE / file).read_text()) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("values/layer.py", "from jackfield.engines.engine import Engine"),
        ("errors.py", "import jackfield.axes, jackfield.trace.tracer"),
        ("interleave/worker.py", "def late():\n    from jackfield.values import value"),
        ("trace/tracer.py", "from ..values import layer"),
        ("engines/fake.py", "from jackfield import Model"),
        ("plots/pattern.py", "from jackfield.model import Model"),
        ("engines/transformers/engine.py", "import vllm.config"),
        ("model.py", "if True:\n    from vllm import LLM"),
    ],
)
def test_an_import_that_points_upward_is_found(file, text):
    assert forbidden(file, text) != []


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith(NAMED_IN)])
def test_only_families_know_module_names(file):
    assert family_names((SOURCE / file).read_text()) == []


def test_a_module_name_is_found():
    assert family_names('"""self_attn"""\nplace = block.get_submodule("self_attn.q_proj")') == ["self_attn.q_proj"]


def test_every_part_has_a_row():
    assert {file.removesuffix(".py").split("/")[0] for file in FILES} <= set(ROW)


def test_public_names_are_sorted_and_all_there():
    names = jackfield.__all__
    assert names == sorted(names, key=_ruff_order)
    assert len(set(names)) == len(names)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(names) - {"__version__"} == {name for name in imported if not name.startswith("_")}


def test_every_error_is_public():
    errors = {
        name
        for name, item in vars(jackfield.errors).items()
        if isinstance(item, type) and issubclass(item, jackfield.JackfieldError)
    }
    assert errors <= set(jackfield.__all__)


def test_the_tree_of_errors_is_drawn_whole():
    tree = jackfield.errors.__doc__ or ""
    for name, item in vars(jackfield.errors).items():
        if isinstance(item, type) and issubclass(item, Exception):
            assert f" {name}" in tree


def _ruff_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, each by the alphabet: how `ruff` sorts `__all__`."""
    if name.isupper():
        return 0, name
    return (1 if name[0].isupper() else 2), name
