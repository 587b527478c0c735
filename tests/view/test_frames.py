"""The page inside other pages: notebooks, sites, viewers that leave out frames or scripts."""

import re
from typing import Any

import pytest
import torch

from captum_vz.visualization import View, view
from captum_vz.visualization.view.page import FRAME_HEIGHT, LEFT_OUT
from tests.view.pages import TOKENS, Open, at_rest, ready, shares, token

FIRST, SECOND = (view([shares(8, seed), shares(8, seed + 1)], TOKENS, token=5) for seed in (1, 7))


def around(*views: View, attributes: str = "") -> str:
    shown = "".join(one._repr_html_() for one in views)
    return f"<!DOCTYPE html><html lang='en'><title>x</title><body {attributes}>{shown}</body></html>"


def frames(page: Any, count: int) -> list[Any]:
    for number in range(count):
        page.frame_locator("iframe").nth(number).locator("body[data-ready]").wait_for()
    found: list[Any] = page.frames[1:]
    return found


def theme(page: Any) -> str:
    at_rest(page)
    found: str = page.evaluate("document.documentElement.dataset.theme")
    return found


def test_frame_is_as_high_as_its_content(opened: Open) -> None:
    page = opened(around(FIRST), wait=False)
    (frame,) = frames(page, 1)
    at_rest(page)
    closed = page.locator("iframe").bounding_box()["height"]
    frame.click("#help summary")
    at_rest(page)
    opened_height = page.locator("iframe").bounding_box()["height"]
    assert opened_height > closed + 60
    assert frame.evaluate("document.documentElement.scrollHeight") <= opened_height + 1
    frame.click("#help summary")
    at_rest(page)
    assert page.locator("iframe").bounding_box()["height"] == closed
    # JupyterLab hides the notebooks whose tabs are behind another: the height stays.
    page.evaluate("document.body.style.display = 'none'")
    at_rest(page)
    assert page.evaluate("document.querySelector('iframe').style.height") == f"{closed:g}px" != f"{FRAME_HEIGHT}px"


def test_frame_has_its_height_before_it_is_in_sight(opened: Open) -> None:
    """JupyterLab does not render cells that are not in sight, so that nothing is observed in them."""
    blind = "<head><script>window.ResizeObserver = class { observe() {} };</script>"
    page = opened(around(FIRST).replace("<head>", blind), wait=False)
    (frame,) = frames(page, 1)
    high = frame.evaluate("document.body.offsetHeight")
    assert page.locator("iframe").bounding_box()["height"] == high != FRAME_HEIGHT


def test_questions_leave_the_page_around_where_it_is(opened: Open) -> None:
    """A frame below that begins with a question would take the keyboard, and scroll the notebook down to itself."""
    quiz = view([shares(8, 1), shares(8, 2)], TOKENS, predict=[1, 5])
    tall = "<!DOCTYPE html><body><button autofocus>x</button><div style='height: 3000px'></div>"
    page = opened(tall + quiz._repr_html_(), wait=False)
    (frame,) = frames(page, 1)
    at_rest(page)
    assert page.evaluate("[scrollY, document.activeElement.tagName]") == [0, "BUTTON"]
    asked = frame.locator(".flow button.now")
    assert asked.evaluate("one => one.tabIndex") == 0
    token(frame, "hat").click()
    assert frame.evaluate("document.activeElement.id") == "next"
    frame.locator("#next").press("Enter")
    assert frame.evaluate("document.activeElement.classList.contains('now')")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("data-jp-theme-light='false'", "dark"),
        ("data-jp-theme-light='true'", "light"),
        ("class='vscode-dark'", "dark"),
        ("class='vscode-light'", "light"),
        ("class='dark'", "dark"),
        ("data-theme='dark'", "dark"),
        ("data-theme='auto'", "light"),
    ],
)
def test_theme_of_the_page_around(attributes: str, expected: str, opened: Open) -> None:
    system = "light" if expected == "dark" or "auto" in attributes else "dark"
    page = opened(around(FIRST, attributes=attributes), wait=False, color_scheme=system)
    (frame,) = frames(page, 1)
    assert theme(frame) == expected
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")  # it changes with the notebook
    assert theme(frame) == "dark"


def test_theme_of_the_system_and_given(opened: Open) -> None:
    page = opened(FIRST.html(), color_scheme="dark")
    assert theme(page) == "dark"
    page.emulate_media(color_scheme="light")
    assert theme(page) == "light"
    given = view(shares(8, 1), TOKENS, theme="dark")
    assert theme(opened(given.html(), color_scheme="light")) == "dark"


def test_page_in_another_encoding(opened: Open) -> None:
    """A frame's document has the encoding of the page around it, here Latin-1."""
    made = view(shares(2, 1), ["漢", "“é”"])
    page = opened("<meta charset='latin-1'>" + made._repr_html_(), wait=False)
    (frame,) = frames(page, 1)
    assert frame.locator(".flow button").all_text_contents() == ["漢", "“é”"]
    assert page.locator("body > details td").count() == 5


def test_tables_without_frames_or_scripts(opened: Open) -> None:
    shown = FIRST._repr_html_()
    start, _, table = shown.partition("</iframe>")
    assert start.startswith("<iframe title=")
    assert not {"<script", "<style", " class=", " id="} & {
        one for one in ("<script", "<style", " class=", " id=") if one in table
    }
    page = opened(f"<!DOCTYPE html><body>{table}</body>", wait=False)
    page.locator("summary").click()
    cells = page.locator("tbody tr").nth(5).locator("td").all_inner_texts()
    assert cells == [f"{one:.2f}" for one in FIRST.methods[0].panels[1].scores[5].tolist()]
    # JupyterLab removes the tags of a frame from a notebook that is not trusted, and keeps the text between them.
    shown = around(FIRST)
    page = opened(shown, wait=False)
    frames(page, 1)
    assert LEFT_OUT not in page.inner_text("body")
    page = opened(re.sub(r'<iframe title=("[^"]*"|[^">])*>|</iframe>', "", shown), wait=False)
    assert page.inner_text("body").startswith(LEFT_OUT)
    assert page.locator("summary").is_visible()
    page = opened(FIRST.html(), wait=False, java_script_enabled=False)
    page.locator("noscript summary").click()
    assert page.locator("noscript tbody tr").count() == 8
    # JupyterLab removes gradients from a notebook that is not trusted: then its black numbers stood on a dark page.
    table = view(torch.tensor([[0.75, 0.25], [-0.75, 0.0]]), ["a", "b"])._repr_html_().partition("</iframe>")[2]
    cells = re.findall(r"<td style=\"[^\"]*;background-color:(#[0-9a-f]{6});color:#000\">([^<]*)</td>", table)
    assert cells == [("#5ea2cf", "0.75"), ("#c9e0ef", "0.25"), ("#ff9d59", "-0.75"), ("#ffffff", "0.00")]


def test_frame_of_another_origin_still_works(opened: Open) -> None:
    """A sandbox without `allow-same-origin`, as some viewers put around outputs."""
    shown = FIRST._repr_html_().replace("<iframe ", '<iframe sandbox="allow-scripts" ')
    page = opened(f"<!DOCTYPE html><body>{shown}</body>", wait=False)
    (frame,) = frames(page, 1)
    assert ready(frame)
    token(frame, "the").click()
    assert "the draws on" in frame.inner_text(".answer")
    assert not frame.locator("#link").is_visible()  # a frame has no address
