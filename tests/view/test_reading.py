"""What a reader sees who points at tokens, compared with the maps themselves."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from torch import Tensor

from captum_vz.functional import pool_groups
from captum_vz.visualization import view
from tests.view import pages

pytestmark = pytest.mark.slow

COUNT = len(pages.TOKENS)
LAYERS = [pages.shares(COUNT, seed) for seed in (1, 2)]
ROLLOUT = LAYERS[1] @ LAYERS[0]
OTHER = {"layer 0": pages.shares(COUNT, 3), "layer 1": pages.shares(COUNT, 4), "rollout": pages.shares(COUNT, 5)}
DISTANCES = torch.tensor([1.0, 0.5, 0.25, 2.0, 1.0, 4.0, 1.0, 1.0], dtype=torch.float64)
TWO = {"one": LAYERS, "two": OTHER}
HEADS = [torch.stack([pages.shares(COUNT, 10 * layer + head) for head in range(3)])[None] for layer in range(2)]


def written(row: Tensor, strength: Tensor | None = None) -> list[str]:
    """The numbers below the tokens: shares whose color can be told from the background."""
    strength = row.sqrt() if strength is None else strength
    return [f"{one:.2f}"[1:] if root > 0.07 else "" for one, root in zip(row.tolist(), strength.tolist(), strict=True)]


def drawers(scores: Tensor, place: int) -> list[int]:
    """The rows that draw on a source more than evenly."""
    return [i for i, one in enumerate(scores[:, place].tolist()) if one > 1 / scores.shape[1]]


def assert_shows(page: Any, scores: Tensor, place: int, number: int = 0) -> None:
    assert pages.numbers(page, number) == written(scores[place])
    order = sorted(range(COUNT), key=pages.light(page, number).__getitem__)
    assert order[:3] == scores[place].argsort(descending=True)[:3].tolist()
    assert pages.underlined(page, number) == drawers(scores, place)


def test_hover_shows_sources_and_dependents(opened: pages.Open) -> None:
    page = opened(view(LAYERS, pages.TOKENS, rollout=ROLLOUT, layer=2).html())
    pages.release(page)
    assert set(pages.numbers(page)) == {""}
    for place in (1, 5):
        pages.token(page, pages.TOKENS[place]).hover()
        pages.at_rest(page)
        assert_shows(page, ROLLOUT, place)
    strongest = pages.TOKENS[int(ROLLOUT[5].argmax())]
    answer = page.inner_text(".answer").replace("\N{NO-BREAK SPACE}", " ")
    assert f"hat draws on {strongest} ({ROLLOUT[5].max():.0%}".replace("%", " %") in answer
    page.mouse.move(5, 790)
    pages.at_rest(page)
    assert set(pages.numbers(page)) == {""}


def test_tap_and_click_pin(opened: pages.Open) -> None:
    page = opened(view(LAYERS, pages.TOKENS).html(), has_touch=True)
    pages.token(page, "of").tap()
    assert_shows(page, LAYERS[1], 4)
    pages.token(page, "the").hover()
    pages.at_rest(page)
    assert_shows(page, LAYERS[1], 4)
    pages.token(page, "of").tap()
    pages.token(page, "hat").hover()
    pages.at_rest(page)
    assert_shows(page, LAYERS[1], 5)
    page.mouse.down()
    page.mouse.up()
    pages.token(page, "the").hover()
    pages.at_rest(page)
    assert_shows(page, LAYERS[1], 5)


@pytest.mark.parametrize("wide", [1280, 400])
def test_click_counts_while_the_page_is_painted(wide: int, opened: pages.Open) -> None:
    """A click is counted if the page is painted after the mouse button goes down and before it goes up."""
    page = opened(view(LAYERS, pages.TOKENS, layer=1).html(), viewport={"width": wide, "height": 900})
    pages.layer(page, "layer 0").hover()
    pages.at_rest(page)
    page.mouse.down()
    page.evaluate("document.getElementById('texts').dispatchEvent(new PointerEvent('pointerleave'))")
    pages.at_rest(page)
    page.mouse.up()
    assert pages.shown_layer(page) == "layer 0"
    assert page.evaluate("document.activeElement.textContent").startswith("layer 0")


def test_map_is_linked_to_the_text(opened: pages.Open) -> None:
    page = opened(view(LAYERS, pages.TOKENS, token=5).html())
    whole = page.locator("#map")
    box = whole.bounding_box()
    cell = 24
    above = box["height"] - 2 - cell * COUNT
    middle = lambda row, column: {"x": 90 + (column + 0.5) * cell, "y": above + (row + 0.5) * cell}  # noqa: E731
    whole.hover(position=middle(3, 6))
    tip = page.locator("#depths .tip").last
    assert tip.inner_text() == f"##tures draws on .: {LAYERS[1][3, 6]:.3f}"
    pixel = "([x, y]) => [...document.querySelector('#map').getContext('2d').getImageData(x, y, 1, 1).data]"
    dark = [[sum(page.evaluate(pixel, list(middle(r, c).values()))) for c in range(COUNT)] for r in range(COUNT)]
    assert torch.tensor(dark).argmin(1).tolist() == LAYERS[1].argmax(1).tolist()
    whole.click(position=middle(3, 0))
    page.mouse.move(5, 5)
    assert_shows(page, LAYERS[1], 3)
    frame = page.locator(".whole span").bounding_box()
    assert frame["y"] == pytest.approx(box["y"] + above + 3 * cell, abs=2)


def test_heads_have_rows_of_their_own(opened: pages.Open) -> None:
    page = opened(view(HEADS, pages.TOKENS, token=5).html())
    titles = page.locator("#depths h2").all_inner_texts()
    assert titles[:2] == ["In which layer? click a row", "In which head? click a row"]
    assert_shows(page, HEADS[1][0, 2], 5)
    pages.layer(page, "head 1").click()
    assert_shows(page, HEADS[1][0, 1], 5)
    pages.layer(page, "layer 0").click()
    assert pages.shown_layer(page) == "layer 0, head 1"
    assert_shows(page, HEADS[0][0, 1], 5)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1000])
def test_all_heads_on_one_screen(opened: pages.Open, theme: str, width: int) -> None:
    """A small map for each head. A click shows this head, and a tab that has no use is hidden."""
    page = opened(view(HEADS, pages.TOKENS, token=5, theme=theme).html(), viewport={"width": width, "height": 800})
    page.locator("#heads").click()
    cells = page.locator("#every button")
    assert cells.evaluate_all("all => all.map((one) => one.title)") == [
        f"layer {layer}, head {head}" for layer in range(2) for head in range(3)
    ]
    assert page.locator("#every span").all_inner_texts() == ["layer 0", "layer 1"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = "one => [...one.getContext('2d').getImageData(0, 0, one.width, one.height).data]"
    pixels = torch.tensor(page.locator("#every canvas").nth(1).evaluate(drawn)).view(COUNT, COUNT, 4)[..., 0]
    away = (pixels - pixels.max() if theme == "light" else pixels - pixels.min()).abs()
    assert away.argmax(1).tolist() == HEADS[0][0, 1].argmax(1).tolist()
    assert not page.locator("#depths").is_visible()
    cells.nth(1).click()
    assert pages.shown_layer(page) == "layer 0, head 1"
    assert page.locator("#depths").is_visible()
    assert not opened(view(TWO, pages.TOKENS).html()).locator("#heads").is_visible()


def test_address_keeps_token_and_layer(opened: pages.Open) -> None:
    page = opened(view(TWO, pages.TOKENS, rollout={"one": ROLLOUT}, token=5).html())
    pages.token(page, "of").click()
    pages.layer(page, "layer 0").click()
    assert page.evaluate("location.hash") == "#token=4&layer=0"
    page.select_option("#method", label="two")
    address = page.evaluate("location.href")
    assert address.endswith("#token=4&layer=0&method=1")
    page.evaluate("location.hash = '#token=2&layer=rollout'")
    pages.at_rest(page)
    assert_shows(page, OTHER["rollout"], 2)
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    assert_shows(page, OTHER["layer 0"], 4)
    page.evaluate("location.hash = '#token=99&layer=x&method=7'")  # a link of another page
    pages.at_rest(page)
    assert_shows(page, OTHER["layer 0"], 4)


def test_picture_is_saved(opened: pages.Open) -> None:
    made = view(
        LAYERS, pages.TOKENS, token=5, title="a <b> title", subtitle="what is predicted", about={"model": "of mine"}
    )
    page = opened(made.html())
    page.get_by_text("model: of mine").wait_for()
    with page.expect_download() as download:
        page.click("#svg")
    text = Path(download.value.path()).read_text("utf-8")
    drawn = ElementTree.fromstring(text)
    words = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <b> title", "what is predicted", *pages.TOKENS, "layer 0", "layer 1"} <= set(words)
    assert {one for one in written(LAYERS[1][5]) if one} <= set(words)
    assert "model: of mine" in " ".join(filter(None, words))
    with page.expect_download() as download:
        page.click("#png")
    with Image.open(download.value.path()) as picture:
        assert picture.size == (1920, 2 * int(drawn.get("height", "0")))
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50


def test_strip_shows_the_row_in_each_layer(opened: pages.Open) -> None:
    page = opened(view(LAYERS, pages.TOKENS, rollout=ROLLOUT, token=5).html())
    strip = page.locator(".strip canvas")
    assert page.locator(".strip button").all_inner_texts() == ["layer 0", "layer 1", "rollout"]
    assert "hat" in strip.get_attribute("aria-label")
    box = strip.bounding_box()
    rows = [box["height"] - 2 - 24 * (3 - row) + 4 for row in range(3)]
    cell = min(36, box["width"] / COUNT)
    for row, scores in enumerate([*LAYERS, ROLLOUT]):
        strip.hover(position={"x": 2.5 * cell, "y": rows[row]})
        assert page.locator(".tip").first.inner_text().endswith(f"pic: {scores[5, 2]:.3f}")
    pixel = "([x, y]) => [...document.querySelector('.strip canvas').getContext('2d').getImageData(x, y, 1, 1).data]"
    seen = torch.tensor([[sum(page.evaluate(pixel, [(c + 0.5) * cell, y])) for c in range(COUNT)] for y in rows])
    assert seen.argmin(1).tolist() == [int(scores[5].argmax()) for scores in (*LAYERS, ROLLOUT)]
    strip.click(position={"x": 5, "y": rows[0]})
    assert_shows(page, LAYERS[0], 5)


def test_two_methods_side_by_side(opened: pages.Open) -> None:
    page = opened(view(TWO, pages.TOKENS, layer=1).html())
    pages.part(page, "two")
    assert page.locator("#beside option").all_inner_texts() == ["two"]  # without the method that is shown already
    pages.release(page)
    pages.token(page, "hat", view=1).hover()
    pages.at_rest(page)
    assert_shows(page, LAYERS[1], 5, 0)
    assert_shows(page, OTHER["layer 1"], 5, 1)
    places = [page.locator("#texts > div").nth(i).bounding_box() for i in (0, 1)]
    assert places[0]["y"] == places[1]["y"]
    assert places[0]["x"] + places[0]["width"] <= places[1]["x"]
    # If only one has a rollout, the other one shows its last layer.
    assert page.locator("#texts h2").all_inner_texts() == ["one, layer 1", "two, layer 1"]
    page.select_option("#method", label="two")
    assert page.locator("#beside option").all_inner_texts() == ["one"]
    pages.layer(page, "rollout").click()
    assert page.locator("#texts h2").all_inner_texts() == ["two, rollout", "one, layer 1"]


def test_words_add_columns_and_average_rows(opened: pages.Open) -> None:
    page = opened(view(LAYERS, pages.TOKENS, token=3).html())
    pages.part(page, "options")
    page.select_option("#unit", "words")
    words = torch.tensor([[0, 1, 2, 2, 3, 4, 5, 6]])
    pooled = pool_groups(LAYERS[1][None], words, shared=False)[0]
    assert page.locator(".flow button[aria-pressed=true]").inner_text().strip("\n ") == "pictures"
    assert pages.numbers(page) == written(pooled[2])
    assert pages.underlined(page) == drawers(pooled, 2)
    page.select_option("#unit", "pieces")
    assert page.locator(".flow button[aria-pressed=true]").count() == 1


def test_raw_distances(opened: pages.Open) -> None:
    raw = [one * DISTANCES[:, None] for one in LAYERS]
    page = opened(view(raw, pages.TOKENS, token=2).html())
    assert_shows(page, LAYERS[1], 2)
    assert "pic moves by 0.250; the token that moves most, by 4.00." in page.inner_text("#read")
    before = pages.light(page)
    pages.part(page, "options")
    page.select_option("#values", "raw")
    strongest = int(LAYERS[1][2].argmax())
    assert float(pages.numbers(page)[strongest]) == pytest.approx(raw[1][2, strongest].item(), rel=0.05)
    # A quarter of the color is left where a sixteenth of the largest distance was to divide.
    after = pages.light(page)
    assert (1 - after[strongest]) / (1 - before[strongest]) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(("name", "gone"), [("special", [0, 7]), ("stop words", [1, 4]), ("punctuation", [6])])
def test_filter_leaves_out_sources(name: str, gone: list[int], opened: pages.Open) -> None:
    page = opened(view(LAYERS, pages.TOKENS, token=5).html())
    pages.part(page, "options")
    page.get_by_label(name).check()
    expected = ["" if place in gone else one for place, one in enumerate(written(LAYERS[1][5]))]
    assert pages.numbers(page) == expected
    pages.part(page, "numbers")
    page.locator("tbody tr").first.wait_for()
    assert page.locator("tbody tr").count() == COUNT - len(gone)


def test_rounded_numbers_say_so(opened: pages.Open) -> None:
    """The page of a long text has few levels, which its sentences say."""
    maps = [pages.shares(60, seed) for seed in range(13)]
    page = opened(view(maps, [f"t{place}" for place in range(60)], token=7).html())
    strongest = int(maps[-1][7].argmax())
    text = page.inner_text(".answer").replace("\N{NO-BREAK SPACE}", " ")
    shown = round(100 * maps[-1][7, strongest].item())
    assert text.startswith(f"In layer 12, t7 draws on t{strongest} (\N{ALMOST EQUAL TO} {shown} %), ")


def test_left_out_sources_do_not_count(opened: pages.Open) -> None:
    """The scale of a row ends at the largest source that is shown, and the strip leaves the others white."""
    row = torch.tensor([0.93, *[0.01] * (COUNT - 1)])
    page = opened(view([row.expand(COUNT, COUNT)] * 2, pages.TOKENS, token=5).html())
    pages.part(page, "options")
    page.select_option("#scale", "row")
    assert min(pages.light(page)[1:]) > 0.9
    page.get_by_label("special").check()
    assert max(pages.light(page)[1:-1]) < 0.4
    pixel = "(one, x) => [...one.getContext('2d').getImageData(x, one.height - 6, 1, 1).data]"
    first, second = (page.locator(".strip canvas").evaluate(pixel, x) for x in (5, 41))
    assert first[:3] == [255, 255, 255]
    assert sum(second[:3]) < 300


def test_table_is_copied(opened: pages.Open) -> None:
    page = opened(
        view(LAYERS, pages.TOKENS, rollout=ROLLOUT, token=5).html(), permissions=["clipboard-read", "clipboard-write"]
    )
    pages.part(page, "numbers")
    page.locator("tbody tr").first.wait_for()
    page.click("#copy")
    page.locator("#copied", has_text="Copied").wait_for()
    heads, *rows = page.evaluate("navigator.clipboard.readText()").split("\n")
    assert heads.split("\t") == ["position", "source", "layer 0", "layer 1", "rollout"]
    cells = [row.split("\t") for row in rows]
    assert [one[1] for one in cells] == pages.TOKENS
    for column, scores in enumerate([*LAYERS, ROLLOUT]):
        assert [one[2 + column] for one in cells] == [f"{score:.3f}" for score in scores[5].tolist()]
    shown = page.locator("tbody tr").evaluate_all(
        "all => all.map((row) => [...row.cells].map((one) => one.textContent))"
    )
    assert shown == cells
    assert "Copied 8 rows" in page.inner_text("#copied")


def test_two_texts_and_generated_tokens(opened: pages.Open) -> None:
    scores = pages.shares(2, 6, columns=3)
    page = opened(view(scores, ["ein", "Hut"], columns=["a", "hat", "."], token=1).html())
    assert page.locator("#texts h2:visible").all_inner_texts()[:2] == ["Source tokens", "Output tokens"]
    assert pages.numbers(page)[:3] == written(scores[1])
    pages.token(page, "hat").click()
    assert [place - 3 for place in pages.underlined(page)] == drawers(scores, 1)
    scores = torch.tensor([[0.75, 0.25, 0, 0], [0.25, 0.125, 0.625, 0]])
    page = opened(view(scores, ["x", "y"], columns=["a", "b", "x", "y"], offset=2, token=1).html())
    assert page.locator("#texts h2:visible").all_inner_texts()[:2] == ["Prompt", "Generated tokens"]
    assert pages.numbers(page) == [".25", ".13", ".63", ""]
    pages.token(page, "x").click()
    assert pages.numbers(page) == [".75", ".25", "", ""]
    assert pages.underlined(page) == [3]
    scores = torch.tensor([[0.5, -2.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 4.0]])
    page = opened(view(scores, ["a", "b", "c"], token=0).html())
    assert pages.numbers(page) == ["+0.50", "-2.0", ""]
    positive, negative, _ = pages.colors(page)
    assert positive[2] > positive[0] and negative[0] > negative[2]


def test_page_of_one_row(opened: pages.Open) -> None:
    """Nothing else can be explained, and the legend does not offer it. It says that colours are of the square root."""
    scores = torch.tensor([[1.26, 0.005, -0.5]])
    own = opened(view({"output": scores}, ["hat"], columns=["hat", ".", "x"], offset=0).html()).inner_text("main")
    assert "hat depends most on" in own and "In output" not in own and "more than evenly" not in own
    page = opened(view([scores, scores[:, [1, 0, 2]]], ["POSITIVE"], columns=["hat", ".", "x"]).html())
    legend = page.inner_text("#legend")
    assert "is explained" in legend and "click another" not in legend and "draws on it" not in legend
    assert "+1.26 score (square-root scale)" in legend
    page.set_viewport_size({"width": 300, "height": 800})
    page.reload()
    pages.layer(page, "layer 1").wait_for()
    assert pages.layer(page, "layer 1").get_attribute("aria-label") == "layer 1 \u201c.\u201d +1.3"
    whole = opened(view(LAYERS, pages.TOKENS).html())
    assert "click another" in whole.inner_text("#legend") and "draws on it" in whole.inner_text("#legend")
    assert "1 share of the row (square-root scale)" in whole.inner_text("#legend")
