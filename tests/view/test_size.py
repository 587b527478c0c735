"""The size of a page, its speed with long texts, and the form of its code."""

import json
import re
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import pytest

import captum_vz
from captum_vz.visualization import View, view
from tests.view.pages import Open, at_rest, missing, node_module, ready, release, shares

FOLDER = Path(captum_vz.__file__).parent / "visualization" / "view"


def long(count: int, maps: int = 7, methods: int = 1) -> View:
    labels = [f"word{i % 97}" for i in range(count)]
    return view({f"m{m}": [shares(count, maps * m + i) for i in range(maps)] for m in range(methods)}, labels, token=3)


def data_of(page: str) -> str:
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return found[1]


def test_code_is_at_most_36_kb_and_loads_nothing() -> None:
    page = view(shares(2, 1), ["a", "b"]).html()
    static = page[page.index("<noscript>") : page.index("</noscript>")]
    assert len(page) - len(static) - len(data_of(page)) <= 36_000
    # Tokens are set as text, and nothing is loaded.
    module = (FOLDER / "view.js").read_text("ascii")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|import\b|https?:", module)
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(("maps", "methods"), [(7, 1), (13, 1), (7, 2)])
def test_60_tokens_take_80_kb(maps: int, methods: int) -> None:
    assert len(data_of(long(60, maps, methods).html())) < 80_000


def calls(session: Any) -> int:
    """How many functions of the page's module have been called since the last count."""
    scripts = session.send("Profiler.takePreciseCoverage")["result"]
    counts = [{one["functionName"]: one["ranges"][0]["count"] for one in script["functions"]} for script in scripts]
    return sum(sum(one.values()) for one in counts if "score" in one)


def layouts(session: Any) -> int:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(int(one["value"]) for one in metrics if one["name"] == "LayoutCount")


@pytest.mark.slow
def test_512_tokens_are_fast(opened: Open) -> None:
    """What is counted are calls and layouts: a page opens with one map, and pointing takes a row and a column."""
    count, hovers = 512, 10
    page = opened(long(count).html())
    session = page.context.new_cdp_session(page)
    for domain in ("Profiler", "Performance"):
        session.send(f"{domain}.enable")
    session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
    page.reload()
    at_rest(ready(page))
    assert 0 < calls(session) < 20 * count**2
    release(page)
    at_rest(page)
    read, laid_out = page.inner_text("#read"), layouts(session)
    calls(session)
    for place in range(10, 10 + hovers):
        page.locator(".flow button").nth(place).dispatch_event("pointerover", {"bubbles": True, "pointerType": "mouse"})
        at_rest(page)
    assert 0 < calls(session) < 200 * count * hovers
    assert layouts(session) - laid_out <= 2 * hovers
    assert page.inner_text("#read") != read


def test_module_passes_the_linter(tmp_path: Path) -> None:
    if which("node") is None:
        missing("There is no node: apt-get install nodejs.")
    module = tmp_path / "view.mjs"
    module.write_text((FOLDER / "view.js").read_text("ascii"))
    subprocess.run(["node", "--check", str(module)], check=True, capture_output=True)
    folder = node_module("eslint")
    if folder is None:
        missing("There is no eslint: npm install eslint, and NODE_PATH=.../node_modules.")
    rules: dict[str, Any] = dict.fromkeys(["no-shadow", "prefer-const", "no-var", "eqeqeq", "no-eval"], "error")
    names = "window document parent Blob Response DecompressionStream Option ResizeObserver MutationObserver navigator \
        matchMedia getComputedStyle requestAnimationFrame devicePixelRatio setTimeout clearTimeout atob history \
        location Image ImageData URL URLSearchParams XMLSerializer"
    known = dict.fromkeys(names.split(), "readonly")
    config = [{"files": ["**/*.mjs"], "languageOptions": {"globals": known, "ecmaVersion": 2022}, "rules": rules}]
    recommended = (folder.parent / "@eslint" / "js" / "src" / "index.js").as_uri()
    (tmp_path / "eslint.config.mjs").write_text(
        f"import js from '{recommended}';\nexport default [js.configs.recommended, ...{json.dumps(config)}];"
    )
    command = ["node", str(folder / "bin" / "eslint.js"), "--max-warnings", "0", "view.mjs"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
