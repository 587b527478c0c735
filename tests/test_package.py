"""The package as a whole: what an import costs, what it offers, and the rules of the house."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import get_origin

import pytest
import torch

import captum_vz
import captum_vz.attr

PACKAGE = Path(captum_vz.__file__).parent

# From the ground up. A room may import from the rooms below its row, and from itself; "" is captum_vz/__init__.py.
# Rooms of the engine have rows of their own; "_engine" is its facade.
ROOMS = [
    {"errors", "_private", "_start", "_files"},
    {"functional", "_names"},
    {"_engine.numerics"},
    {"_engine.taps"},
    {"_engine.capture"},
    {"_engine.structure"},
    {"_engine.replay", "_engine.decomposition"},
    {"_engine.value_zeroing", "_engine.whole_model"},
    {"_engine"},
    {"attr._call"},
    {"attr._base"},
    {"attr"},
    {"visualization", "metrics"},
    {""},
    {"text"},
    {"testbed"},
    {"subjects"},
    {"methods", "verification"},
    {"result"},
    {"generation"},
    {"app"},
    {"study"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
ROW = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}
ENGINE = "captum_vz._engine"
LONGEST_CHAIN = 10
# The files that may register hooks. Hooks that stay behind would change the user's model.
HOOK_FILES = {"_engine.taps.changes", "_engine.capture.forward_pass"}
HOOK_FILES |= {"_engine.whole_model.cache", "_engine.whole_model.gradients"}
# The verification records layers by hooks of its own, because it shares no code with the engine.
HOOK_FILES |= {"verification.recorded"}
# Activation patching changes what a layer is given, for one forward pass.
HOOK_FILES |= {"study.examples.patching"}
# Every folder but `attr`, which holds one method a file, has at most nine files.
ROOMY = {"attr"}
# The most Python files of the package, and of its engine.
MOST_FILES = {"": 147, "_engine": 30}
Graph = dict[str, set[str]]


def test_what_an_import_and_a_command_load() -> None:
    """In one new process: the package alone, its classes after captum's, and an explanation."""
    program = f"""
import sys, captum_vz
named = {list(captum_vz._ROOMS)}
print(set(named) <= set(dir(captum_vz)), sys.modules.keys() & {{"torch", *map("captum_vz.{{}}".format, named)}})
import captum.attr
before = set(sys.modules)
from captum_vz import ValueZeroing, find_layers, word_mask
print(*(set(sys.modules) - before))
from captum_vz.cli import main
main(["explain", "some hat [MASK] small.", "--json"])
print()
print(*sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    alone, brought, *_, every = run.stdout.splitlines()
    assert alone == "True set()"
    ours = {"captum_vz", "captum", "torch", "numpy", *sys.stdlib_module_names}
    assert {"captum_vz"} <= {name.partition(".")[0] for name in brought.split()} <= ours
    loaded = set(every.split())
    assert "transformers.models.bert.modeling_bert" in loaded
    assert not loaded & {"transformers.models.llama.modeling_llama", "captum_vz.demo"}
    assert not loaded & {"gradio", "pandas", "pyarrow", "sklearn", "networkx"}
    for room in captum_vz._ROOMS:
        assert getattr(captum_vz, room) is sys.modules[f"captum_vz.{room}"]
    assert not hasattr(captum_vz, "charts")


def test_public_names_have_docstrings() -> None:
    for module in (captum_vz, captum_vz.functional):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            thing = getattr(module, name)
            # In Python 3.10, an alias of Callable is taken for a class.
            if inspect.isfunction(thing) or (inspect.isclass(thing) and get_origin(thing) is None):
                assert thing.__doc__, f"{module.__name__}.{name} has no docstring"


def test_names_for_authors_are_one_level_down() -> None:
    for_authors = {"AttentionBlock", "LayerMaps", "LogitTerms", "MapAggregation", "MapRun", "ModelFreeAttribution"}
    for_authors |= {"Wanted"}
    assert for_authors == set(captum_vz.attr.__all__) - set(captum_vz.__all__)
    assert not [name for name in for_authors if hasattr(captum_vz, name)]


def test_each_name_has_one_home() -> None:
    homes: dict[str, list[str]] = {}
    for room in captum_vz._ROOMS:
        for name in getattr(captum_vz, room).__all__:
            homes.setdefault(name, []).append(room)
    assert len(homes) > 100
    assert {name: rooms for name, rooms in homes.items() if len(rooms) > 1} == {}


def test_argument_errors_are_value_errors() -> None:
    assert issubclass(captum_vz.ArgumentError, (ValueError, captum_vz.RefusedError))
    assert not issubclass(captum_vz.UnsupportedLayerError, ValueError)
    with pytest.raises(ValueError, match="layer is 'encoder'"):
        captum_vz.ValueZeroing(len, "encoder").attribute(torch.zeros(1, 2))


def test_imports_point_downwards_only() -> None:
    upwards = [
        f"{importer} imports {imported}"
        for importer, imports in graph_of_imports(annotations=True).items()
        for imported in imports
        if not may_import(room_of(importer), room_of(imported))
    ]
    assert not upwards


def test_no_circle_of_imports() -> None:
    assert not circles(graph_of_imports(annotations=True))


def test_import_chains_of_the_engine() -> None:
    engine = {name: imports for name, imports in graph_of_imports().items() if name.startswith(f"{ENGINE}.")}
    chain = longest_chain(engine)
    assert len(chain) <= LONGEST_CHAIN, " imports ".join(chain)


def test_chains_and_circles_are_found() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"e"}, "e": {"d"}}
    assert circles(graph) == {"d", "e"}
    assert longest_chain({name: graph[name] for name in "abc"}) == ["a", "b", "c"]


def test_only_the_facade_is_imported() -> None:
    inside = [
        f"{importer} imports {imported}"
        for importer, imports in graph_of_imports().items()
        for imported in imports
        if not importer.startswith(ENGINE) and imported.startswith(f"{ENGINE}.")
    ]
    assert not inside


def test_places_that_register_hooks() -> None:
    hook = re.compile(r"register_(module_)?(forward|backward|full_backward)_\w*hook")
    found = {name for name, path in FILES.items() if hook.search(text_of(path))}
    assert found == {f"captum_vz.{name}" for name in HOOK_FILES}


def test_no_file_is_too_long() -> None:
    assert not {str(path): count for path in PACKAGE.rglob("*.py") if (count := len(text_of(path).splitlines())) > 400}


def test_package_has_few_files() -> None:
    counts = {room: len(list((PACKAGE / room).rglob("*.py"))) for room in MOST_FILES}
    assert all(counts[room] <= most for room, most in MOST_FILES.items()), counts


def test_no_room_is_too_full() -> None:
    """A folder inside a room, such as replay/folded, counts as one file."""
    rooms = {str(path.parent.relative_to(PACKAGE)): path.parent for path in PACKAGE.glob("*/**/__init__.py")}
    files = {room: [path for path in folder.iterdir() if is_code(path)] for room, folder in rooms.items()}
    assert not {room: len(found) for room, found in files.items() if len(found) > 9 and room not in ROOMY}
    assert len(files["_engine/taps"]) > 1


def test_engine_raises_its_own_errors() -> None:
    """Python drops `assert` under -O. In the engine, an `assert` only narrows a type for mypy."""
    asserts = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in (PACKAGE / "_engine").rglob("*.py")
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.Assert) and not narrows_a_type(node)
    ]
    assert not asserts


def test_narrowing_is_told_from_checks() -> None:
    source = "assert x is not None\nassert isinstance(x, A) and y.z is not None\nassert x\nassert x is not None, 'no x'"
    found = [narrows_a_type(node) for node in ast.parse(source).body if isinstance(node, ast.Assert)]
    assert found == [True, True, False, False]


def test_every_form_of_import_is_seen() -> None:
    source = """
import torch, captum_vz.attr
from captum_vz import functional, ValueZeroing
from .definition import DefinitionReplay
from . import packed
from ...study import run
if TYPE_CHECKING:
    from captum_vz.metrics import score
def later():
    from captum_vz.cli import main
"""
    run = [
        "captum_vz.attr",
        "captum_vz.functional",
        "captum_vz",
        "captum_vz._engine.replay.definition",
        "captum_vz._engine.replay.packed",
        "captum_vz.study.run",
    ]
    assert list(imports_of(source, "captum_vz._engine.replay")) == [*run, "captum_vz.cli"]
    annotated = list(imports_of(source, "captum_vz._engine.replay", annotations=True))
    assert annotated == [*run, "captum_vz.metrics", "captum_vz.cli"]


def may_import(importer: str, imported: str) -> bool:
    return importer == imported or ROW[imported] < ROW[importer]


def room_of(module: str) -> str:
    _, room, inner, *_ = [*module.split("."), "", ""]
    room = f"{room}.{inner}" if (room == "_engine" and inner) or f"{room}.{inner}" in ROW else room
    assert room in ROW, f"captum_vz.{room} is in no row of ROOMS. Say there what it may import."
    return room


def is_code(path: Path) -> bool:
    return (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").is_file()


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).parent.parts)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def imports_of(source: str, package: str, annotations: bool = False) -> Iterator[str]:
    """The modules of captum_vz that a file of that package imports, at its top or anywhere else.

    Imports under `if TYPE_CHECKING:` serve annotations and are not run. They are left out unless `annotations` is set.
    """
    for node in nodes_of(ast.parse(source), annotations):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "captum_vz")
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            if module.split(".")[0] == "captum_vz":
                for alias in node.names:
                    yield f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module


def nodes_of(tree: ast.AST, annotations: bool) -> Iterator[ast.AST]:
    """The nodes of a tree, with or without those under `if TYPE_CHECKING:`."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        typed = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if annotations or not typed:
            yield from nodes_of(node, annotations)


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def narrows_a_type(node: ast.Assert) -> bool:
    """Whether an `assert` says only that something is not None or is an instance, and gives the user no message."""
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    narrow = re.compile(r"[\w.]+ is not None|isinstance\(.*\)")
    return node.msg is None and all(narrow.fullmatch(ast.unparse(test)) for test in tests)


def circles(graph: Graph) -> set[str]:
    """The files that import each other in a circle, and those that import them."""
    left = {name: set(imports) for name, imports in graph.items()}
    while free := {name for name, imports in left.items() if not imports & left.keys()}:
        left = {name: imports for name, imports in left.items() if name not in free}
    return set(left)


def longest_chain(graph: Graph) -> list[str]:
    """The longest chain of imports. The graph has no circle."""

    @cache
    def chain_from(name: str) -> list[str]:
        return [name, *max((chain_from(one) for one in graph[name] if one in graph), key=len, default=[])]

    return max((chain_from(name) for name in sorted(graph)), key=len)


@cache  # not while pytest collects: each of its processes would parse the package twice
def graph_of_imports(annotations: bool = False) -> Graph:
    """The files that each file of the package imports. The facade names what stands above it, for annotations only."""
    imports = {
        name: imports_of(text_of(path), package_of(path), annotations and name != "captum_vz")
        for name, path in FILES.items()
    }
    return {name: {one for one in found if one in FILES} - {name} for name, found in imports.items()}


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}
