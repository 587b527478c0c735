"""Pages for the tests: small maps with known numbers, opened in the system's Chromium."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from tests.documents import ROOT

TOKENS = ["[CLS]", "the", "pic", "##tures", "of", "hat", ".", "[SEP]"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
Open = Callable[..., Any]


def shares(count: int, seed: int, columns: int | None = None) -> Tensor:
    """A map of shares in which no two scores of a row are alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(3 * torch.randn(count, columns or count, generator=generator, dtype=torch.float64), -1)


def missing(reason: str) -> NoReturn:
    """Skip a test whose tool is missing. Under CAPTUM_VZ_NO_SKIP=1, which `.ci/run` sets, the test fails."""
    if os.environ.get("CAPTUM_VZ_NO_SKIP"):
        pytest.fail(reason)
    pytest.skip(reason)


def node_module(name: str) -> Path | None:
    """A package of npm in the folders of NODE_PATH or in the checkout. `.ci/run` installs it."""
    folders = [*filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)), str(ROOT / "node_modules")]
    return next((Path(folder) / name for folder in folders if (Path(folder) / name).is_dir()), None)


def violations(page: Any) -> list[str]:
    """What axe-core finds, with the elements."""
    folder = node_module("axe-core")
    if folder is None:
        missing("There is no axe-core: npm install axe-core, and NODE_PATH=.../node_modules.")
    page.evaluate((folder / "axe.min.js").read_text("utf-8"))
    # Without `preload`, axe-core does not request the style sheets a second time.
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")["violations"]
    return [json.dumps([one["id"], [node["html"] for node in one["nodes"]][:3]]) for one in found]


LOADING = {"src", "href", "action", "data", "poster", "background", "srcset", "formaction", "ping"}


class Page(HTMLParser):
    """The elements, text, addresses and visible cells of a page, and the same of the pages in its frames but cells."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags, self.loaded, self.rows = list[str](), list[str](), list[list[str]]()
        self.text, self.hidden = "", False
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.hidden = self.hidden or "hidden" in dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        for name, value in attrs:
            if name == "srcdoc":
                inner = Page(value or "")
                self.tags += inner.tags
                self.text += inner.text
                self.loaded += inner.loaded
            elif (name in LOADING and not (value or "").startswith(("data:", "#"))) or name.startswith("on"):
                self.loaded.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        # The end of <b> closes what is open inside it, in every browser.
        self.hidden = self.hidden and tag not in ("b", "td", "span")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1] and not self.hidden:
            self.rows[-1][-1] += data


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. A process can have one playwright: tests take the fixture `browser`."""
    if CHROMIUM is None:
        missing("There is no Chromium: apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def ready(page: Any) -> Any:
    page.wait_for_selector("body[data-ready]")
    return page


def part(page: Any, name: str) -> None:
    """Open a part of the page: look, predict, two, numbers or options."""
    page.locator(f"#{name}").click()


def layer(page: Any, name: str) -> Any:
    return page.locator(".strip button").filter(has_text=name).first


def shown_layer(page: Any) -> str:
    """The layer that is shown, as the page writes it in its answer."""
    found: str = page.locator(".answer b").first.inner_text()
    return found


def release(page: Any) -> None:
    """Let go of the token that is chosen at first."""
    page.locator(".flow button[tabindex='0']").first.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(5, 5)


def tokens(page: Any, view: int = 0) -> Any:
    return page.locator("#texts > div").nth(view).locator(".flow button")


def token(page: Any, label: str, view: int = 0) -> Any:
    """The button of a token, by its exact text."""
    return tokens(page, view).get_by_text(label, exact=True).first


def numbers(page: Any, view: int = 0) -> list[str]:
    """What is written below the tokens."""
    found: list[str] = tokens(page, view).evaluate_all("all => all.map((one) => one.dataset.share)")
    return found


def colors(page: Any, view: int = 0) -> list[list[float]]:
    """The tokens' backgrounds: red, green, blue, and opacity if they are not opaque."""
    script = "all => all.map((one) => getComputedStyle(one).backgroundColor.match(/[\\d.]+/g).map(Number))"
    found: list[list[float]] = tokens(page, view).evaluate_all(script)
    return found


def light(page: Any, view: int = 0) -> list[float]:
    """The brightness of the tokens' backgrounds, from 0 (black) to 1."""
    return [1.0 if color[3:] == [0] else sum(color[:3]) / 765 for color in colors(page, view)]


def underlined(page: Any, view: int = 0) -> list[int]:
    """The positions of the tokens with a line in the color of the mark."""
    lines = tokens(page, view).evaluate_all("all => all.map((one) => one.style.borderBottom.includes('--mark'))")
    return [place for place, line in enumerate(lines) if line]


# Rest


SECONDS = 120  # a page that is not at rest by then is at fault
FRAMES = 3
#: Timers of more than half a second are not counted: they take something back, or look again.
WATCH = """{
window.timers = new Set();
const [begin, end] = [window.setTimeout, window.clearTimeout];
window.setTimeout = (run, wait = 0, ...rest) => {
    const timer = begin((...given) => {
        timers.delete(timer);
        run(...given);
    }, wait, ...rest);
    if (wait <= 500) timers.add(timer);
    return timer;
};
window.clearTimeout = (timer) => {
    timers.delete(timer);
    end(timer);
};
}"""
STILL = """async ([seconds, frames]) => {
    const shown = ({ document }) => [...document.querySelectorAll('iframe')]
        .filter((frame) => frame.contentDocument && frame.getClientRects().length).map((frame) => frame.contentWindow);
    const all = (one) => [one, ...shown(one).flatMap(all)];
    const ends = ({ playState, effect }) => playState === 'running' && effect.getComputedTiming().endTime !== Infinity;
    const busy = ({ document, timers = [] }) => [
        ...document.readyState === 'complete' ? [] : ['document'], ...[...timers].map((one) => `timer ${one}`),
        ...document.getAnimations().filter(ends).map((one) => one.transitionProperty || one.animationName),
        ...[...document.images].filter((one) => one.loading !== 'lazy' && !one.complete).map((one) => one.src),
    ];
    const begun = performance.now();
    for (let calm = 0; calm < frames; calm += 1) {
        const left = all(window).flatMap(busy);
        if (left.length) calm = -1;
        if (performance.now() - begun > 1000 * seconds) throw Error(`not at rest: ${left}`);
        await new Promise(requestAnimationFrame);
    }
}"""


def context_of(browser: Any, **options: Any) -> Any:
    """A context of a browser. Its pages can be waited for."""
    made = browser.new_context(**options)
    made.set_default_timeout(1000 * SECONDS)
    made.add_init_script(WATCH)
    return made


def at_rest(page: Any) -> Any:
    """The page, as soon as it is at rest."""
    page.evaluate(STILL, [SECONDS, FRAMES])
    return page
