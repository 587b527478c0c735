"""The package as a whole: what importing it costs, what it offers, and that imports point downwards only."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import captum_vz

PACKAGE = Path(captum_vz.__file__).parent

# From the ground up. A room may import from the rooms below its row, and from itself; "" is captum_vz/__init__.py.
# `app` and `generation` are planned.
ROOMS = [
    {"errors"},
    {"functional"},
    {"_engine"},
    {"attr"},
    {"visualization", "generation", "metrics"},
    {""},
    {"text"},
    {"testbed"},
    {"study"},
    {"cli", "app"},
    {"__main__"},
]
ROW = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}


def test_importing_brings_in_nothing_but_what_captum_brings() -> None:
    program = """
import sys, captum.attr
before = set(sys.modules)
import captum_vz
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    brought = set(run.stdout.split())
    ours = {"captum_vz", "captum", "torch", "numpy", *sys.stdlib_module_names}
    assert "captum_vz" in brought
    assert brought <= ours


def test_every_public_name_is_there_and_described() -> None:
    for module in (captum_vz, captum_vz.functional):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                assert thing.__doc__, f"{module.__name__}.{name} has no docstring"


def test_imports_point_downwards_only() -> None:
    upwards = [
        f"{path.relative_to(PACKAGE)} imports {imported}"
        for path in PACKAGE.rglob("*.py")
        for imported in imports_of(path.read_text(encoding="utf-8"), package_of(path))
        if not may_import(room_of(name_of(path)), room_of(imported))
    ]
    assert not upwards


def test_the_rule_on_imports_can_tell_up_from_down() -> None:
    assert may_import("attr", "_engine")
    assert may_import("attr", "attr")
    assert not may_import("_engine", "attr")
    assert not may_import("metrics", "visualization")


def test_every_form_of_import_is_seen() -> None:
    source = """
import torch, captum_vz.attr
from captum_vz import functional, ValueZeroing
from .replay import Replay
from ..study import table
def later():
    from captum_vz.cli import main
"""
    assert list(imports_of(source, "captum_vz._engine")) == [
        "captum_vz.attr",
        "captum_vz.functional",
        "captum_vz",
        "captum_vz._engine.replay",
        "captum_vz.study",
        "captum_vz.cli",
    ]


def may_import(importer: str, imported: str) -> bool:
    return importer == imported or ROW[imported] < ROW[importer]


def room_of(module: str) -> str:
    room = [*module.split("."), ""][1]
    assert room in ROW, f"captum_vz.{room} stands in no row of the house: say in ROOMS what it may import"
    return room


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).parent.parts)


def imports_of(source: str, package: str) -> Iterator[str]:
    """The modules of captum_vz that a file of that package imports, at its top or anywhere else."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "captum_vz")
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            if module == "captum_vz":
                for alias in node.names:
                    yield f"captum_vz.{alias.name}" if is_module(alias.name) else "captum_vz"
            elif module.startswith("captum_vz."):
                yield module


def is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
