"""What is shipped: the files of the wheel and of the source distribution, their licenses, and no pickles."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open

import captum_vz
from captum_vz.testbed.models import EMBEDDED
from tests.documents import ROOT

PACKAGE = ROOT / "captum_vz"
DATA = ["LICENSE.txt", "card.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
BUILD = "import setuptools.build_meta as build; print(build.build_wheel('dist')); print(build.build_sdist('dist'))"
SHIPPED = {
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
}
Contents = dict[str, bytes]


def wheel_in(folder: Path) -> Contents:
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the source distribution, built from a copy, as `.ci/run` does: the checkout stays as it is."""
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE, source / "captum_vz", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=True)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Contents:
    return wheel_in(dist)


def test_wheel_holds_the_package(wheel: Contents) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel if ".dist-info/" not in name} == expected
    data = {f"captum_vz/testbed/{model}/{name}" for model in EMBEDDED for name in DATA}
    assert data | {"captum_vz/py.typed"} <= expected


def test_wheel_states_its_licenses(wheel: Contents) -> None:
    about = {name.partition(".dist-info/")[2]: data.decode() for name, data in wheel.items() if ".dist-info/" in name}
    assert about["licenses/LICENSE"].startswith("BSD 3-Clause License")
    assert "License-File: LICENSE\n" in about["METADATA"]
    for model in EMBEDDED:
        assert f"License-File: captum_vz/testbed/{model}/LICENSE.txt\n" in about["METADATA"]
    assert re.search(r"^License(-Expression)?: BSD-3-Clause$", about["METADATA"], re.MULTILINE)
    for model in EMBEDDED:
        data = wheel[f"captum_vz/testbed/{model}/LICENSE.txt"].decode()
        assert all(name in data for name in ("BSD 3-Clause", "BLiMP", "CC BY 4.0"))
    assert about["entry_points.txt"] == "[console_scripts]\ncaptum-vz = captum_vz.cli:main\n"


def test_sources_hold_the_package(dist: Path, wheel: Contents) -> None:
    """Without tests, which need a whole checkout. `.ci/run` builds its wheel from them."""
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    built = {"captum_vz", "captum_vz.egg-info", "PKG-INFO", ""}
    assert {name.partition("/")[0] for name in names} == SHIPPED | built
    assert {name for name in wheel if ".dist-info/" not in name} <= names


def test_page_of_an_index(wheel: Contents) -> None:
    (about,) = (data.decode() for name, data in wheel.items() if name.endswith("METADATA"))
    heads, description = about.split("\n\n", 1)
    versions = {f"Classifier: Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)}
    assert {*versions, "Classifier: Typing :: Typed", "Requires-Python: >=3.10"} <= set(heads.splitlines())
    assert "Project-URL: Paper, https://aclanthology.org/2023.eacl-main.245" in heads
    assert "Description-Content-Type: text/markdown" in heads
    assert description.startswith("# captum_vz\n")
    links = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", description, flags=re.DOTALL))
    assert links
    assert all(link.startswith("https://") for link in links)
    # The words of links are kept.
    assert "pictures, generated text,\nstudies, how it works and how to extend\nit." in description
    assert "![" not in description


def test_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {captum_vz.__version__}\n" in citation
    assert "https://aclanthology.org/2023.eacl-main.245" in citation


def test_hosted_checks_call_our_own() -> None:
    """The workflows have no commands of their own, so what they check can be run anywhere."""
    found = {
        command
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for command in re.findall(r"- run: (.*)", path.read_text("utf-8"))
    }
    assert {command.split()[0] for command in found} == {".ci/run", ".ci/exhaustive", ".ci/versions"}
    assert all((ROOT / command.split()[0]).is_file() for command in found)


def test_weights_are_safetensors() -> None:
    pickles = {".bin", ".ckpt", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
    folders = (PACKAGE, ROOT / "tests", ROOT / "tutorials")
    assert not [path for folder in folders for path in folder.rglob("*") if path.suffix in pickles]
    for model, least in (("agreement", 50), ("six-layers", 50), ("pre-norm", 50), ("causal", 25)):
        with safe_open(PACKAGE / "testbed" / model / "model.safetensors", "pt") as weights:
            assert len(weights.keys()) > least


def test_nothing_is_unpickled() -> None:
    """Neither pickles nor a model's own Python code: no option, default or environment variable switches them on."""
    pickled = r"pickle\.(?!dumps)|from pickle|allow_pickle|joblib"
    dangerous = re.compile(rf"{pickled}|torch\.load\(|weights_only|trust_remote_code=(?!False)")
    found = [path.parent.name for path in PACKAGE.rglob("*.py") if dangerous.search(path.read_text("utf-8"))]
    # Workers of Ray get the methods of a study and return its errors. The identity of code is a digest of its pickle.
    # A layer's state is copied by a pickle of it, which stays in memory.
    assert sorted(found) == ["folder", "study", "taps"]
    assert not re.search(r"pickle\.load\(", "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py")))
    calls = re.compile(r"from_pretrained\(((?s:.*?))\)\n")
    loaded = [call for path in PACKAGE.rglob("*.py") for call in calls.findall(path.read_text("utf-8"))]
    refused = [call for call in loaded if re.search(r"trust_remote_code=False|\*\*safely", call)]
    assert len(loaded) == 2 + len(refused) == 8  # two load the package's own kinds of models
    held = '{"trust_remote_code": False, "local_files_only": is_local}'
    assert held in (PACKAGE / "subjects" / "loading.py").read_text("utf-8")
