"""The page inside other pages: notebooks, sites, viewers that leave out frames or scripts."""

from typing import Any

import pytest

from captum_vz.visualization import View, view
from tests.view.pages import TOKENS, Open, ready, shares, token

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
    page.wait_for_timeout(60)
    found: str = page.evaluate("document.documentElement.dataset.theme")
    return found


def test_two_views_do_not_disturb_each_other(opened: Open) -> None:
    page = opened(around(FIRST, SECOND), wait=False)
    one, two = frames(page, 2)
    page.wait_for_timeout(300)  # the live region of each has spoken
    before = two.inner_text("main")
    token(one, "the").click()
    one.get_by_role("slider").press("ArrowLeft")
    one.get_by_label("stop words").check()
    assert one.inner_text("#name") == "layer 0"
    assert two.inner_text("main") == before
    assert not two.get_by_label("stop words").is_checked()


def test_frame_is_as_high_as_its_content(opened: Open) -> None:
    page = opened(around(FIRST), wait=False)
    (frame,) = frames(page, 1)
    page.wait_for_timeout(100)
    closed = page.locator("iframe").bounding_box()["height"]
    frame.click("#table summary")
    frame.locator("tbody tr").first.wait_for()
    page.wait_for_timeout(100)
    opened_height = page.locator("iframe").bounding_box()["height"]
    assert opened_height > closed + 100
    assert frame.evaluate("document.documentElement.scrollHeight") <= opened_height + 1
    frame.click("#table summary")
    page.wait_for_timeout(100)
    assert page.locator("iframe").bounding_box()["height"] == closed


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


def test_theme_changes_with_the_notebook(opened: Open) -> None:
    page = opened(around(FIRST, attributes="data-jp-theme-light='true'"), wait=False)
    (frame,) = frames(page, 1)
    assert theme(frame) == "light"
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    assert theme(frame) == "dark"
    assert frame.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"


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


def test_table_follows_without_frames(opened: Open) -> None:
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


def test_long_text_has_its_strongest_sources() -> None:
    scores = shares(60, 3)
    table = view(scores, [f"t{i}" for i in range(60)])._repr_html_().partition("</iframe>")[2]
    place = int(scores[59].argmax())
    assert f"<bdi>t{place}</bdi> {scores[59, place]:.3f}" in table.rpartition("<tr>")[2]


def test_page_without_scripts_has_the_table(opened: Open) -> None:
    page = opened(FIRST.html(), wait=False, java_script_enabled=False)
    page.locator("noscript summary").click()
    assert page.locator("noscript tbody tr").count() == 8


def test_frame_of_another_origin_still_works(opened: Open) -> None:
    """A sandbox without `allow-same-origin`, as some viewers put around outputs."""
    shown = FIRST._repr_html_().replace("<iframe ", '<iframe sandbox="allow-scripts" ')
    page = opened(f"<!DOCTYPE html><body>{shown}</body>", wait=False)
    (frame,) = frames(page, 1)
    assert ready(frame)
    token(frame, "the").click()
    assert "the draws on" in frame.inner_text("#read")
