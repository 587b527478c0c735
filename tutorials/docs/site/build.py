"""Builds the site: `python tutorials/docs/site/build.py [OUTPUT]`. It needs the extra `docs`, and takes 20 seconds.

The pages, the notebooks and a few files from elsewhere in the repository are copied to `source`, next to the output.
There they get their places in the site. Links between them are rewritten. A link to a file that is not in the site is
an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VIEWS = "views"
OUTPUT = ROOT / "build" / "site" / "html"

# Where files of the repository are in the site. The start page takes the place of the README.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/sweep/RESULTS.md": "results.md",
    "tests/benchmarks/RESULTS.md": "measurements.md",
    "tutorials/README.md": "making_lessons.md",
    "captum_vz/visualization/view/three_steps.svg": "images/three_steps.svg",
}
THEME_LACKS = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
    '<summary aria-label="Toggle hidden content">': "<summary>",  # the name of a button is what it shows
    '<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
    # What is wider than the page is scrolled by keys.
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
}
EMPTY_HEAD = re.compile(r"<th\b([^>]*)>\s*(?:<p></p>)?\s*</th>")
RAW_TABLE = re.compile(r"<table\b(?![^>]*\bdocutils\b).*?</table>", re.DOTALL)  # of the outputs of notebooks
FOLDED = """<details class="answer">
<summary>The answer</summary>

{text}

</details>"""
NOTEBOOKS = "notebooks"
VERDICT = "application/vnd.captum-vz.verdict+json"
DOWNLOADS = (
    f'<a href="../{NOTEBOOKS}/{{name}}.ipynb" download>Download this notebook</a>, or '
    f'<a href="../{NOTEBOOKS}/{{name}}_student.ipynb" download>the student\'s copy</a>, without solutions and answers.'
)
HEADING = re.compile(r"#+ .*\n+")
PICTURE = re.compile(r'<img [^>]*src="([^"]*_images/[^"]+)"[^>]*>')
VIEW = re.compile(r"^<!-- view: (\w+) -->$", re.MULTILINE)
ALT = re.compile(r"!\[[^\]]*\]\(")  # MyST joins the lines of a picture's text without a space
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def places() -> Iterator[tuple[Path, Path]]:
    """Each file that the site is made of, and its path in the site."""
    tutorials = ROOT / "tutorials"
    for path in sorted((tutorials / "docs").glob("*.md")):
        yield path, Path(path.name)
    for path in sorted(tutorials.glob("*.ipynb")):
        yield path, Path("lessons", path.name)
    for path in sorted((tutorials / "captum").glob("*.py")):
        yield path, path.relative_to(tutorials)
    for path in sorted((tutorials / "images").rglob("*.*")):
        yield path, path.relative_to(tutorials)
    for path in sorted((HERE / "api").glob("*.rst")):
        yield path, path.relative_to(HERE)
    yield HERE / "conf.py", Path("conf.py")
    for name in ("style.css", "copy.js"):
        yield HERE / name, Path("static", name)
    for name, place in ELSEWHERE.items():
        yield ROOT / name, Path(place)


def rewritten(text: str, path: Path, place: Path, known: dict[Path, Path]) -> str:
    """The text of a page with its links as they have to be in the site."""

    def link(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve()
        if target not in known:
            raise FileNotFoundError(f"{path.relative_to(ROOT)} links to {match[1]}, which is not in the site.")
        return os.path.relpath(known[target], place.parent).replace(os.sep, "/") + (match[2] or "")

    text = ALT.sub(lambda match: " ".join(match[0].split("\n")), text)
    return VIEW.sub(rf"```{{raw}} html\n:file: {VIEWS}/\1.html\n```", LINK.sub(link, text))


def lesson(text: str, path: Path, place: Path, known: dict[Path, Path]) -> str:
    """A notebook with its links rewritten, texts for its pictures, and its answers folded."""
    notebook = json.loads(text)
    heading = path.stem
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = rewritten("".join(cell["source"]), path, place, known)
            heading = cell["source"].partition("\n")[0].lstrip("# ") if cell["source"].startswith("#") else heading
        else:  # otherwise, the text of a picture is the name of its file
            cell["metadata"]["mystnb"] = {"image": {"alt": f"What the code above draws, in section “{heading}”"}}
            for output in cell["outputs"]:  # MyST warns of what only the grader reads
                output.get("data", {}).pop(VERDICT, None)
    fold_answers(notebook["cells"])
    first = notebook["cells"][0]
    first["source"] += "\n\n" + DOWNLOADS.format(name=path.stem)
    return json.dumps(notebook)


def fold_answers(cells: list[dict[str, Any]]) -> None:
    """Folds solutions, the texts of answers, and all outputs between a question or an exercise and its answer."""
    asked: list[list[str]] | None = None  # tags of the cells that show something since a question or an exercise
    for cell in cells:
        tags = cell["metadata"].setdefault("tags", [])
        if cell["cell_type"] == "markdown":
            if "answer" in tags:
                cell["source"] = folded(cell["source"])
                for shown in asked or []:
                    shown.append("hide-output")
            asked = None if "answer" in tags or cell["source"].startswith("#") else asked
        elif {"solution", "answer"} & set(tags):
            tags.append("hide-cell")
        elif asked is not None and cell["outputs"] and "check" not in tags:
            asked.append(tags)
        if {"question", "exercise"} & set(tags):
            asked = asked or []


def folded(markdown: str) -> str:
    """A text as a block that a click opens. Its first heading, if it begins with one, stays outside."""
    heading = HEADING.match(markdown)
    begin = heading.end() if heading else 0
    return markdown[:begin] + FOLDED.format(text=markdown[begin:].strip())


def copy_sources(source: Path) -> None:
    """Copies all files to the folder, except those that are there already. Files of an earlier build are deleted."""
    known = dict(places())
    for path, place in known.items():
        if path == ROOT / "README.md":
            continue
        content = path.read_bytes()
        if path.suffix in (".md", ".ipynb"):
            change = lesson if path.suffix == ".ipynb" else rewritten
            content = change(content.decode("utf-8"), path, place, known).encode("utf-8")
        target = source / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != content:  # Sphinx reads only what has changed
            target.write_bytes(content)
    (source / "extra").mkdir(exist_ok=True)
    placed = {source / place for place in known.values()}
    for path in source.rglob("*"):
        if path.is_file() and path not in placed and path.parent.name != VIEWS:
            path.unlink()


def write_notebooks(folder: Path) -> None:
    """Writes each lesson and its student's copy, for a download."""
    from captum_vz_lessons.lab import write_student_copy

    folder.mkdir(parents=True)
    for path in (ROOT / "tutorials").glob("*.ipynb"):
        shutil.copy(path, folder)
        write_student_copy(path, folder / f"{path.stem}_student.ipynb")


def accessible(html: str) -> str:
    """A page with what axe-core finds missing in the theme: levels of headings, names of regions, and focus.

    A click on a picture opens its file, because a narrow screen shows it too small to be read.
    """
    html = RAW_TABLE.sub(r'<div class="table-wrapper">\g<0></div>', html)
    for old, new in THEME_LACKS.items():
        html = html.replace(old, new)
    html = EMPTY_HEAD.sub(r"<td\1></td>", html)
    return PICTURE.sub(_opened, html)


def _opened(picture: re.Match[str]) -> str:
    """A picture with a link to its file, unless it stands in a link."""
    before = picture.string[: picture.start()]
    if before.rfind("<a ") > before.rfind("</a>"):
        return picture[0]
    return f'<a class="picture" href="{picture[1]}">{picture[0]}</a>'


def main(output: Path = OUTPUT) -> int:
    """Builds the site in `output`, with sources and caches next to it. Returns Sphinx's status, 0 without warnings."""
    from sphinx.cmd.build import main as sphinx

    sys.path[:0] = [str(HERE), str(ROOT / "tutorials")]  # of the views, and of the lessons' package
    from views import write_views

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    output = output.resolve()
    source, doctrees = output.with_name("source"), output.with_name("doctrees")
    copy_sources(source)
    write_views(source / VIEWS)
    shutil.rmtree(output, ignore_errors=True)
    status = sphinx(["-W", "--keep-going", "-q", "-b", "html", "-d", str(doctrees), str(source), str(output)])
    write_notebooks(output / NOTEBOOKS)
    for page in output.rglob("*.html"):
        page.write_text(accessible(page.read_text("utf-8")), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
