"""The site builds without a warning, all links and pictures in it lead somewhere, and no page makes a request."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest

from tests.documents import ROOT
from tests.view.pages import at_rest, context_of, violations

SITE = ROOT / "tutorials" / "docs" / "site"
DOCUMENTED = ["", "functional", "visualization", "generation", "study", "metrics", "verification", "text", "testbed"]
# One page of each kind: the view, code, differences, wide tables, formulas, notebooks with folded cells, the search.
KINDS = ["index", "captum_scripts", "pictures", "measurements", "results", "api/attention", "api/value_zeroing"]
KINDS += ["search", "lessons/01_value_zeroing_with_captum", "lessons/10_which_method_is_right"]

spec = util.spec_from_file_location("site_build", SITE / "build.py")
assert spec is not None and spec.loader is not None
build = util.module_from_spec(spec)
spec.loader.exec_module(build)


@dataclass
class Page(HTMLParser):
    """What a page links to, what it loads, and what can be linked to."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    pictures_without_text: list[str] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    inside: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.inside = tag
        self.ids |= {named["id"]} if "id" in named else set()
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "prefetch"):
            self.loaded.append(named["href"])
        if "src" in named:
            self.loaded.append(named["src"])
        if tag == "img" and (not named.get("alt") or "_images/" in named["alt"]):
            self.pictures_without_text.append(named["src"])
        if "srcdoc" in named:
            self.frames.append(named["srcdoc"])
        self.styles.append(named.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


def requests_of(page: Page) -> list[str]:
    """What a page would load from other hosts, frames included."""
    found = [one for one in page.loaded if urlsplit(one).scheme not in ("", "data") or one.startswith("//")]
    found += [one for style in page.styles for one in re.findall(r"(?:@import|url\()[^;)]*//[^;)]*", style)]
    return found + [one for frame in page.frames for one in requests_of(parsed(frame))]


def pages_of(site: Path) -> dict[Path, Page]:
    return {path: parsed(path.read_text("utf-8")) for path in site.rglob("*.html")}


def broken_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """The links of all pages, and what they load, that lead to no file or to no place in a page."""
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or not link or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            named = not parts.fragment or unquote(parts.fragment) in getattr(pages.get(target), "ids", set())
            if not target.is_file() or not named:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as a user builds it."""
    output = tmp_path_factory.mktemp("site") / "html"
    command = [sys.executable, str(SITE / "build.py"), str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return output


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return pages_of(site)


@pytest.mark.slow
def test_links_and_pictures_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert not broken_links(site, pages)


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert not {path.name: found for path, page in pages.items() if (found := requests_of(page))}
    sheets = {path.name: path.read_text("utf-8") for path in site.rglob("*.css")}
    assert sheets
    assert not [name for name, text in sheets.items() if re.search(r"(?:@import|url\()[\s\"']*(?:https?:)?//", text)]


@pytest.mark.slow
def test_pictures_have_a_text(pages: dict[Path, Page]) -> None:
    assert not {path.name: page.pictures_without_text for path, page in pages.items() if page.pictures_without_text}


@pytest.mark.slow
def test_pictures_open_at_full_size(site: Path) -> None:
    for name in ("pictures.html", "lessons/02_reading_maps_layer_by_layer.html"):
        text = (site / name).read_text("utf-8")
        page = parsed(re.sub(r'<div class="thumbs.*?</div>', "", text, flags=re.DOTALL))  # these lead to sections
        pictures = [one for one in page.loaded if "_images/" in one]
        assert pictures
        assert not set(pictures) - set(page.links)


@pytest.mark.slow
def test_each_page_is_in_the_site(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "tutorials" / "docs").glob("*.md")}
    lessons = {path.stem for path in (ROOT / "tutorials").glob("*.ipynb")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    assert lessons == {path.stem for path in (site / "lessons").glob("*.html")}
    start = parsed((site / "index.html").read_text("utf-8"))
    reached = {urlsplit(link).path for link in start.links}
    assert {f"{page}.html" for page in pages - {"index"}} <= reached
    assert {f"lessons/{lesson}.html" for lesson in lessons} <= reached


@pytest.mark.slow
def test_notebooks_are_shown_with_their_outputs(site: Path, pages: dict[Path, Page]) -> None:
    lesson = site / "lessons" / "01_value_zeroing_with_captum.html"
    assert lesson.read_text("utf-8").count("cell_output") >= 10
    assert any(one.endswith(".png") for one in pages[lesson].loaded)


@pytest.mark.slow
def test_tables_are_tables(site: Path) -> None:
    """Tables of Markdown, in pages and in outputs of notebooks, become tables of HTML."""
    pages = [path for path in site.rglob("*.html") if "_modules" not in path.parts]
    raw = re.compile(r"\|\s*(?:-{3,}|—)\s*\|")
    code = re.compile(r"<pre.*?</pre>", re.DOTALL)
    assert not [path.name for path in pages if raw.search(code.sub("", path.read_text("utf-8")))]
    shown = {"measurements": 8, "choosing": 3, "lessons/03_the_paper_reproduced": 1}
    assert all((site / f"{page}.html").read_text("utf-8").count("<table") >= count for page, count in shown.items())


@pytest.mark.slow
def test_answers_of_lessons_are_folded(site: Path) -> None:
    """Solutions are folded, and so are the outputs between a question or an exercise and its answer, and the answer."""
    for path in (ROOT / "tutorials").glob("*.ipynb"):
        folded = {"content": 0, "output": 0, "answer": 0}
        asked, since = False, 0  # outputs since the first question or exercise that has no answer yet
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            tags, is_code = set(cell["metadata"].get("tags", [])), cell["cell_type"] == "code"
            is_answer = not is_code and "answer" in tags
            folded["answer"] += is_answer
            folded["content"] += is_code and bool(tags & {"solution", "answer"})
            is_plain = is_code and not tags & {"solution", "answer", "check", "exercise"}
            since += is_plain and asked and bool(cell["outputs"])
            if is_answer or (not is_code and "".join(cell["source"]).startswith("#")):
                folded["output"] += since * is_answer
                asked, since = False, 0
            asked = asked or bool(tags & {"question", "exercise"})
        shown = (site / "lessons" / f"{path.stem}.html").read_text("utf-8")
        assert shown.count("Show code cell content") == folded["content"] > 0
        assert shown.count("Show code cell output") == folded["output"] > 0
        assert shown.count("<summary>The answer</summary>") == folded["answer"] > 0


@pytest.mark.slow
def test_every_public_name_is_in_the_api(site: Path) -> None:
    text = "".join(path.read_text("utf-8") for path in (site / "api").glob("*.html"))
    ids = re.findall(r'<dt class="sig sig-object py" id="([\w.]+)"', text)
    assert len(ids) == len(set(ids))
    documented = {name.rpartition(".")[2] for name in ids}
    for room in [*(f"captum_vz.{name}".rstrip(".") for name in DOCUMENTED), "captum_vz_lessons.check"]:
        module: ModuleType = importlib.import_module(room)
        names = {name for name in module.__all__ if not isinstance(getattr(module, name), (ModuleType, str))}
        assert not sorted(names - documented), f"{module.__name__} has public names that no page documents"


@pytest.mark.slow
def test_formulas_are_mathml(site: Path) -> None:
    pages = "".join(path.read_text("utf-8") for path in (site / "api").glob("*.html"))
    formulas = re.findall(r"<math.*?</math>", pages)
    assert len(formulas) > 100
    assert not [one for one in formulas if "\\" in one]
    assert "MathJax" not in pages


@pytest.fixture
def opened(site: Path, browser: Any) -> Iterator[Any]:
    """A dark context of a browser without network. The test fails if a page has an error or asks for another host."""
    wrong = []
    context = context_of(browser, color_scheme="dark", offline=True)
    own = (site.as_uri(), "data:", "about:", "blob:")
    context.on("request", lambda request: request.url.startswith(own) or wrong.append(request.url))
    context.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    yield context
    context.close()
    assert not wrong


@pytest.mark.slow
def test_pages_in_a_browser(site: Path, opened: Any) -> None:
    """No request, no error and no sideways scrolling, wide and narrow. Search and views work."""
    for name in ("index", "choosing", "generation", "api/value_zeroing", "lessons/01_value_zeroing_with_captum"):
        page = opened.new_page()
        page.goto((site / f"{name}.html").as_uri())
        for frame in page.frames[1:]:
            frame.wait_for_selector("body[data-ready]")
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (name, width)
        assert page.evaluate("scrollY") == 0, f"{name} does not begin at its top"
        page.close()
    page = opened.new_page()
    page.goto((site / "search.html").as_uri() + "?q=rollout")
    page.wait_for_selector("#search-results li a")
    page.goto((site / "index.html").as_uri())
    (view,) = page.frames[1:]
    view.wait_for_selector("body[data-ready]")
    assert "pictures" in view.locator("body").inner_text()


def place_of(one: Any) -> tuple[float, float, float, float]:
    """The left, upper, right and lower edge of an element on the screen."""
    box = one.bounding_box()
    assert box is not None
    return box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_first_screen_is_the_view_and_three_doors(theme: Literal["light", "dark"], site: Path, opened: Any) -> None:
    """On a laptop the frame with the layers and the map, and the doors, are in sight. On a phone, the answer is."""
    page = opened.new_page()
    page.emulate_media(color_scheme=theme)
    for width, height in ((1366, 768), (1280, 800), (1200, 800), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.goto((site / "index.html").as_uri())
        (view,) = page.frames[1:]
        view.wait_for_selector("body[data-ready]")
        assert view.locator("html").get_attribute("data-theme") == theme
        doors = page.locator(".doors li")
        leads = [door.locator("a").first.get_attribute("href") for door in doors.all()]
        assert leads == ["captum_scripts.html", "choosing.html", "teaching.html"]
        seen = [*doors.all(), view.locator("#title"), view.locator(".answer"), view.locator(".flow")]
        seen += [page.locator(".live"), *view.locator("#depths canvas").all()] if width > 1000 else []
        for one in seen:
            left, top, right, bottom = place_of(one)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
    page.close()


@pytest.mark.slow
def test_doors_are_links_as_a_whole(site: Path, opened: Any) -> None:
    page = opened.new_page()
    for place, name in enumerate(("captum_scripts", "choosing", "teaching")):
        page.goto((site / "index.html").as_uri())
        left, top, *_ = place_of(page.locator(".doors li").nth(place))
        page.mouse.click(left + 5, top + 5)
        page.wait_for_url(f"**/{name}.html")
    page.goto((site / "index.html").as_uri())
    page.get_by_role("link", name="For teachers").last.click()
    page.wait_for_url("**/teaching.html#for-teachers")
    page.close()


@pytest.mark.slow
def test_where_to_go_is_short(site: Path) -> None:
    table = (site / "index.html").read_text("utf-8").partition('id="where-to-go"')[2].partition("</table>")[0]
    assert 5 <= table.count("<tr") - 1 <= 10


@pytest.mark.slow
def test_code_is_copied(site: Path, opened: Any) -> None:
    """Each block of code has a button, and what a block prints has none. Of a diff the new side is copied."""
    opened.grant_permissions(["clipboard-read", "clipboard-write"])
    page = opened.new_page()
    page.goto((site / "captum_scripts.html").as_uri())
    markdown = (ROOT / "tutorials" / "docs" / "captum_scripts.md").read_text("utf-8")
    blocks = re.findall(r"^```(python|diff|bash|console)\n((?s:.*?))^```$", markdown, re.MULTILINE)
    buttons = page.get_by_role("button", name="Copy", exact=True)
    assert buttons.count() == len(blocks) > 10
    for place in (0, [language for language, _ in blocks].index("diff")):
        language, code = blocks[place]
        page.locator("article .copy").nth(place).click()
        page.locator("article .copy").nth(place).get_by_text("Copied").wait_for()
        new = re.sub(r"^[-@].*\n|^[+ ]", "", code, flags=re.MULTILINE) if language == "diff" else code
        assert page.evaluate("navigator.clipboard.readText()").splitlines() == new.splitlines()
    page.close()


@pytest.mark.slow
def test_pictures_begin_with_thumbnails(site: Path) -> None:
    """Sections of the page have an entry at its top: a picture and the title, which lead there."""
    html = (site / "pictures.html").read_text("utf-8")
    entries, text = re.search(r'<div class="thumbs[^>]*>(.*?)</div>\s*(.*)', html, re.DOTALL).groups()
    sections = re.findall(r'<section id="([^"]+)">\s*<h2>(.*?)<a', text)
    links = re.findall(r'<a[^>]*href="#([^"]+)"[^>]*><img[^>]*>\s*(.*?)</a>', entries)
    assert len(links) > 5
    assert {(link, title.strip()) for link, title in links} <= set(sections)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_axe_finds_nothing(width: int, theme: Literal["light", "dark"], site: Path, opened: Any) -> None:
    """The view has a test of its own: axe-core does not look into frames."""
    found = {}
    for name in KINDS:
        page = opened.new_page()
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 800})
        page.goto((site / f"{name}.html").as_uri())
        page.add_style_tag(content="* { animation: none !important; transition: none !important; }")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        at_rest(page)
        found[name] = violations(page)
        page.close()
    assert not {name: one for name, one in found.items() if one}


def test_links_are_rewritten() -> None:
    known = {ROOT / "README.md": Path("index.md"), ROOT / "tutorials" / "a.ipynb": Path("lessons", "a.ipynb")}
    page = ROOT / "tutorials" / "docs" / "page.md"
    text = "[one](../a.ipynb#part), [two](../../README.md), [three](#here), [four](https://captum.ai/)"
    assert build.rewritten(text, page, Path("page.md"), known) == (
        "[one](lessons/a.ipynb#part), [two](index.md), [three](#here), [four](https://captum.ai/)"
    )
    picture = build.rewritten("![Two\nlines](../a.ipynb)", page, Path("page.md"), known)
    assert picture == "![Two lines](lessons/a.ipynb)"
    deeper = build.rewritten("[one](../../README.md#install)", page, Path("lessons", "page.md"), known)
    assert deeper == "[one](../index.md#install)"
    with pytest.raises(FileNotFoundError, match="not in the site"):
        build.rewritten("[lost](../setup.cfg)", page, Path("page.md"), known)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h2 id="part">other</h2>')
    (tmp_path / "page.html").write_text(
        '<a href="other.html#part">1</a><a href="other.html#no">2</a><a href="no.html">3</a><img src="no.png" alt="4">'
        '<a href="https://captum.ai">5</a><a href="#">6</a>'
    )
    assert broken_links(tmp_path, pages_of(tmp_path)) == [
        "page.html: other.html#no",
        "page.html: no.html",
        "page.html: no.png",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<script src="https://cdn.example/a.js"></script>', 1),
        ('<link rel="stylesheet" href="//cdn.example/a.css">', 1),
        ('<style>@import "https://cdn.example/a.css";</style>', 1),
        ('<p style="background: url(https://cdn.example/a.png)">', 1),
        ('<iframe srcdoc="&lt;img src=&quot;https://cdn.example/a.png&quot;&gt;"></iframe>', 1),
        ('<img src="a.png"><img src="data:image/png;base64,aa"><a href="https://captum.ai">link</a>', 0),
    ],
)
def test_requests_are_found(text: str, found: int) -> None:
    assert len(requests_of(parsed(text))) == found
