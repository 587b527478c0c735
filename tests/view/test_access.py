"""The page for all readers: the keyboard, screen readers, dark pages, large text, any script, hostile tokens."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_vz.visualization import save_html, text_record, view
from tests.view import pages

pytestmark = pytest.mark.slow

COUNT = len(pages.TOKENS)
TWO = {
    "one": [pages.shares(COUNT, 1), pages.shares(COUNT, 2)],
    "two": [2 * pages.shares(COUNT, 3), pages.shares(COUNT, 4)],
}
HOSTILE = [
    "<script>document.title='x'</script>",
    "</script><img src=x onerror=alert(1)>",
    "a\"b'c&amp;",
    "nul\0",
    "two\nlines",
    "\u202eback",
    "שלום",
    "مرحبا",
    "👩\u200d👧",
    "漢字",
    " ",
    "",
]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(theme: str, opened: pages.Open) -> None:
    page = opened(view(TWO, pages.TOKENS, token=5, theme=theme).html())
    assert not pages.violations(page)
    page.click("#help summary")
    for name in ("two", "options", "numbers"):
        pages.part(page, name)
        pages.at_rest(page)
        assert not pages.violations(page), name
    for place in range(COUNT):
        pages.token(page, pages.TOKENS[place]).focus()
        page.keyboard.press("Enter")
    assert not pages.violations(page)
    pages.part(page, "predict")
    pages.token(page, "pic").click()
    assert not pages.violations(page)
    heads = [torch.stack(maps)[None] for maps in TWO.values()]
    page = opened(view(heads, pages.TOKENS, token=5, theme=theme).html())
    pages.part(page, "heads")
    pages.at_rest(page)
    assert not pages.violations(page)


def test_axe_checks_the_frame_and_the_table(opened: pages.Open) -> None:
    shown = view(TWO, pages.TOKENS, token=5)._repr_html_()
    document = f"<!DOCTYPE html><html lang='en'><title>x</title><body><main><h1>x</h1>{shown}</main></body></html>"
    page = opened(document, wait=False)
    page.frame_locator("iframe").locator("body[data-ready]").wait_for()
    page.locator("body > main > details > summary").click()
    assert not pages.violations(page)


@pytest.mark.parametrize("width", [1000, 320])
def test_axe_checks_the_page_of_records(width: int, opened: pages.Open, tmp_path: Path) -> None:
    """Its words are read without scrolling sideways, also on a narrow page."""
    rows = {"value-zeroing": pages.shares(1, 1, len(HOSTILE))[0], "signed": pages.shares(1, 2, len(HOSTILE))[0] - 0.1}
    labels: Any = {"true_class": "are", "pred_class": "is", "pred_prob": 0.75}
    records = [text_record(HOSTILE, row, attr_class=name, **labels) for name, row in rows.items()]
    page = opened(save_html(records, tmp_path / "records.html"), wait=False, viewport={"width": width, "height": 800})
    assert not pages.violations(page)
    for words in page.locator("td:last-child").all():
        box = words.bounding_box()
        assert box["width"] > 200
        assert box["x"] + box["width"] <= width


def test_keyboard_alone(opened: pages.Open) -> None:
    page = opened(view(TWO, pages.TOKENS).html())

    def focused() -> str:
        found: str = page.evaluate("document.activeElement.id || document.activeElement.textContent")
        return found

    page.keyboard.press("Tab")
    assert focused() == "hat"  # the token that is chosen at first
    for key, expected in (("Home", "[CLS]"), ("ArrowRight", "the"), ("End", "[SEP]"), ("ArrowLeft", ".")):
        page.keyboard.press(key)
        assert focused() == expected
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator(".flow [aria-pressed=true]").get_attribute("dir") == "auto"
    assert page.locator(".flow [aria-pressed=true]").text_content() == "the"
    for key, expected in (("ArrowDown", "layer 0"), ("ArrowUp", "layer 1")):
        page.keyboard.press(key)
        assert pages.shown_layer(page) == expected
    page.keyboard.press("Escape")
    assert page.locator(".flow [aria-pressed=true]").count() == 0
    page.keyboard.press("Enter")
    for expected in ("method", "look"):
        page.keyboard.press("Tab")
        assert focused() == expected
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first layer
    assert pages.shown_layer(page) == "layer 0"
    pages.layer(page, "layer 1").press("Space")
    assert pages.shown_layer(page) == "layer 1"
    page.locator("#look").focus()
    for expected in ("predict", "two", "numbers"):
        page.keyboard.press("ArrowRight")
        assert focused() == expected
        assert page.locator(f"#{expected}").get_attribute("aria-selected") == "true"
    for expected in ("copy", "cells"):
        page.keyboard.press("Tab")
        assert focused() == expected
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_live_region_says_what_changes(opened: pages.Open) -> None:
    page = opened(view(TWO, pages.TOKENS, layer=0).html())
    live = page.get_by_role("status")
    assert live.get_attribute("aria-live") == "polite"
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    pages.at_rest(page)
    strongest = pages.TOKENS[int(TWO["one"][0][7].argmax())]
    said = live.inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert said.startswith(f"In layer 0, [SEP] draws on {strongest} ({TWO['one'][0][7].max():.0%}".replace("%", " %"))
    assert ".." not in said
    page.keyboard.press("ArrowUp")
    pages.at_rest(page)
    assert live.inner_text().startswith("In layer 1, [SEP] draws on")


def test_large_text_needs_no_sideways_scroll(opened: pages.Open) -> None:
    """1280 pixels at 200 % and 400 % are 640 and 320 CSS pixels."""
    for width in (640, 320):
        page = opened(view(TWO, pages.TOKENS, token=5).html(), viewport={"width": width, "height": 500})
        for name in ("look", "two", "numbers", "options", "predict"):
            pages.part(page, name)
            pages.at_rest(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for one in page.locator("button:visible, select:visible").all():
                box = one.bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width + 1
                assert box["height"] >= 24


@pytest.mark.parametrize("width", [320, 390, 600])
def test_names_of_layers_are_whole(width: int, opened: pages.Open) -> None:
    """A narrow frame has the names, with the strongest token, in two lines where one is too short."""
    rollout = {f"layer {i}": pages.shares(COUNT, i) for i in range(3)} | {
        "rollout, residual 0.5": pages.shares(COUNT, 9)
    }
    tokens = [*pages.TOKENS[:2], "pictures", "scaring", *pages.TOKENS[4:]]
    page = opened(view(rollout, tokens, token=5).html(), viewport={"width": width, "height": 800})
    names = page.locator(".strip button")
    assert names.count() == 4
    for name in names.all():
        beyond = name.evaluate(
            "one => Math.max(one.scrollWidth - one.clientWidth, one.scrollHeight - one.clientHeight)"
        )
        assert beyond <= 2  # the margin in which text is not clipped
    assert re.fullmatch(r"rollout, residual 0\.5 \S+ \.\d\d", names.last.get_attribute("aria-label"))


def test_hostile_tokens_are_inert_and_shown(opened: pages.Open) -> None:
    count = len(HOSTILE)
    made = view(
        {"</script><b>m</b>": [pages.shares(count, 1), pages.shares(count, 2)]}, HOSTILE, title="<i>t</i>", token=0
    )
    made = replace(made, subtitle="<i>s</i>", about={"<i>": "</script><i>"})
    assert made.html().isascii()
    page = opened(made.html())
    assert page.title() == "<i>t</i>"
    assert page.locator("img, i, main script").count() == 0
    shown = page.locator(".flow button").all_text_contents()
    assert shown[:2] == HOSTILE[:2]
    assert shown[2:6] == ["a\"b'c&amp;", r"nul\x00", r"two\nlines", r"\u202eback"]
    assert shown[6:] == ["שלום", "مرحبا", "👩\u200d👧", "漢字", "␣", "∅"]
    assert all(one.bounding_box()["width"] >= 24 for one in page.locator(".flow button").all())
    pages.part(page, "numbers")
    pages.at_rest(page)
    assert page.locator("tbody th").all_text_contents() == shown


def test_right_to_left_text_runs_to_the_left(opened: pages.Open) -> None:
    page = opened(view(pages.shares(3, 1), ["אחת", "שתיים", "שלוש"]).html())
    places = [one.bounding_box()["x"] for one in page.locator(".flow button").all()]
    assert places == sorted(places, reverse=True)
    assert page.locator("h1").evaluate("one => one.dir") == "auto"
    pages.release(page)
    page.locator(".flow button").first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.textContent") == "שתיים"
    assert pages.numbers(page)[0]


@pytest.mark.parametrize("side", [2, 24])
def test_patches_stand_as_in_their_image(side: int, opened: pages.Open) -> None:
    """Patches have the places of the image, also on a phone. Their colours go up to the largest share of the row."""
    names = [f"patch {row},{column}" for row in range(side) for column in range(side)]
    page = opened(view(pages.shares(side**2 + 1, 1), ["[CLS]", *names], token=0).html())
    page.set_viewport_size({"width": 390, "height": 800})
    three = (names[0], names[1], names[side])
    first, right, below = (page.get_by_role("button", name=name, exact=True).bounding_box() for name in three)
    assert right["y"] == first["y"] and below["x"] == first["x"]
    assert right["x"] >= first["x"] + first["width"] > first["x"] + 2
    assert below["y"] >= first["y"] + first["height"] > first["y"] + 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    pages.part(page, "options")
    assert page.input_value("#scale") == "row"
    assert not pages.violations(page)
