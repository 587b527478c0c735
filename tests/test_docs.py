"""Every code block of the pages under `tutorials/docs` runs, and each link leads to a file."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from captum_vz import LayerAttention, LayerAttentionNorm
from captum_vz._engine.taps.projection import VALUE_PROJECTIONS
from tests.documents import ROOT, blocks_of, changed, run_blocks, run_script, script_of

PAGES = sorted((ROOT / "tutorials" / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
SCRIPTS = sorted((ROOT / "tutorials" / "captum").glob("*.py"))
CHANGES = {script_of(block): block for block in blocks_of(ROOT / "tutorials" / "docs" / "captum_scripts.md")}
MOST_LINES = 6  # that add Value Zeroing to a script of Captum's tutorials
MOST_PAGES, MOST_WORDS = 16, 17_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with patch.dict(VALUE_PROJECTIONS):  # a page adds a row
        run_blocks(blocks_of(page))


@pytest.mark.filterwarnings("ignore:In order to make embedding layers", "ignore:Multiple layers provided")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_runs_as_it_is_and_changed(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_script(script.name, script.read_text("utf-8"))
    code, count = changed(CHANGES[script])
    assert count <= MOST_LINES
    names = run_script(script.name, code)
    if script.stem == "squad_2":  # the tutorial computes attention and norms by hand
        by_hand = {LayerAttention: "output_attentions_all", LayerAttentionNorm: "alpha_f_x_norm"}
        for kind, name in by_hand.items():
            method = kind(names["predict"], names["layers"], reduce_heads=None, normalize=False)
            found = method.attribute(names["input_ids"], additional_forward_args=names["more"])
            torch.testing.assert_close(torch.stack(found), names[name], rtol=1e-4, atol=1e-6)


def test_pages_stay_few_and_short() -> None:
    assert len(PAGES) <= MOST_PAGES
    assert sum(len(page.read_text("utf-8").split()) for page in PAGES) <= MOST_WORDS


def test_glossary_has_the_papers_words() -> None:
    glossary = (ROOT / "tutorials" / "docs" / "glossary.md").read_text("utf-8")
    entries = dict(re.findall(r"^- \*\*([^*]+)\*\*: (.+)", glossary, re.MULTILINE))
    assert {"cue", "blank-out", "rollout", "value zeroing", "foil", "residual connection"} <= set(entries)
    assert list(entries) == sorted(entries, key=str.lower)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_links_lead_to_files(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text("utf-8")):
        name, _, heading = link.partition("#")
        target = (document.parent / name) if name else document
        assert target.exists(), f"{document.name} links to {link}, which does not exist."
        assert not heading or heading in _headings(target), f"{document.name} links to {link}: no such heading."


def _headings(document: Path) -> set[str]:
    lines = re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize(
    ("markdown", "complaint"),
    [
        ("```python\nassert one == 1\n```", "'one' is not"),
        ("```diff\n-one = 1\n+two = 2\n```\n```python\nassert one\n```", "'one' is not"),
        ("```diff\n-assert one\n+two = 2\n```", "'one' is not"),
        ("```diff\nplain\n```", "begins with none of"),
        ("```diff\n--- setup.py\n@@\n no such line\n```", "these lines 0 times"),
        ("```bash\nrm -r elsewhere\n```", "cannot run `rm"),
        ("```bash\npip install captum-vz==9 && pytest\n```", "not tried by"),
        ('```bash\npip install ".[none]"\n```', "no extra of setup"),
        ("```bash\ncaptum-vz no-such-command\n```", "exited with 2"),
        ("```python\nprint(1)\n```\n```text\n2\n```", "block before it"),
        ('```json\n{"tokens": []}\n```', "target"),
        ("```bibtex\n@book{half\n```", "a citation that"),
        ("```ruby\nputs 1\n```", "a block of ruby"),
        ("```\nplain\n```", "of no language"),
        ("1. one\n   ```python\n   1\n   ```", "is indented, not"),
    ],
)
def test_wrong_block_is_found(markdown: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(markdown, "utf-8")
    with pytest.raises((AssertionError, NameError, ValueError, pytest.fail.Exception), match=re.escape(complaint)):
        run_blocks(blocks_of(page))


def test_blocks_share_one_session(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nn = 2\n```\nthen\n```python\nprint(n + 1)\n```\n```text\n3\n```\n```bash\npytest\n```")
    run_blocks(blocks_of(page))
    assert [block.line for block in blocks_of(page)] == [1, 5, 8, 11]
