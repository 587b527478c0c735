"""The identity of code: another one whenever a method may give other scores."""

import sys
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_vz.study import METHODS, load_plugin
from captum_vz.study.folder.provenance import code_identity


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (partial(int, base=1), partial(int, base=2)),
        (partial(int, torch.zeros(3)), partial(int, torch.ones(3))),
        (lambda: 1, lambda: 2),
    ],
)
def test_different_code_has_different_identities(one: Any, other: Any) -> None:
    assert code_identity(one) == code_identity(one)
    assert code_identity(one) != code_identity(other)


#: Plugins that define `mine`, a method. The number in the place of NUMBER decides its scores.
PLUGINS = {
    "data": "W = [NUMBER]\ndef mine(batch): return W[0]",
    "partial": "def f(k, batch): return k\nmine = partial(f, NUMBER)",
    "base class": "class B:\n    def attribute(self): return NUMBER\nclass C(B): pass\nmine = C()",
    "slots": (
        "class C:\n    __slots__ = 'k'\n    def __init__(self, k): self.k = k\n    def attribute(self): return self.k\n"
        "mine = C(NUMBER)"
    ),
    "decorated": "def f(): return NUMBER\n@torch.no_grad()\ndef mine(batch): return f()",
    "cache": "def f(): return NUMBER\n@cache\ndef mine(batch): return f()",
    "module": (
        "class M(torch.nn.Module):\n    def __init__(self, k):\n        super().__init__()\n        self.k = k\n"
        "def make(m):\n    return lambda batch: m\nmine = make(M(NUMBER))"
    ),
}


def identity_of(source: str, folder: Path) -> str:
    path = folder / "mine.py"
    path.write_text(
        "from functools import *\nimport numpy as np\nimport torch\nfrom captum_vz.study import register_method\n"
        f"{source}\nregister_method('mine', mine)\n"
    )
    load_plugin(path)
    method = METHODS.pop("mine")
    return code_identity(method.source)


@pytest.fixture(autouse=True)
def bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may keep compiled files, and takes one of the same length and second for the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


@pytest.mark.parametrize("kind", PLUGINS)
def test_changed_plugin_has_another_identity(kind: str, tmp_path: Path) -> None:
    first, again, other = (identity_of(PLUGINS[kind].replace("NUMBER", number), tmp_path) for number in "778")
    assert first == again
    assert first != other


def test_plugins_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """`inspect` looks for a class in the file of its module."""
    kinds = []
    for number in (7, 8):
        path = tmp_path / str(number) / "mine.py"
        path.parent.mkdir()
        path.write_text(
            f"from captum_vz.study import register_method\nclass C:\n    def attribute(self, inputs): return {number}\n"
            "register_method('mine', C)\n"
        )
        load_plugin(path)
        kinds.append(METHODS.pop("mine").source)
    for kind, number in zip(kinds, (7, 8), strict=True):
        assert f"return {number}" in getsource(kind)
    assert len({code_identity(kind).split()[-1] for kind in kinds}) == 2
