"""The demo in a browser: it answers, text stays text, and nothing leaves the machine."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.explaining.models import image_classifier
from tests.view.pages import SECONDS, at_rest, context_of, violations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("gradio") is None and not os.environ.get("CAPTUM_VZ_NO_SKIP"),
        reason="gradio is not installed: pip install captum-vz[demo]",
    ),
]

HOSTILE = """<script>window.hit=1</script> ${alert(1)} <img src=x onerror="window.hit=1"> '"`"""
#: The demo in a process whose every attempt to reach another machine is written to a file. Only addresses of this
#: machine are reached, so that a request outside cannot go unnoticed where there is no network.
PROGRAM = """
import socket, sys
log, *arguments = sys.argv[1:]
OWN = (None, "", "127.0.0.1", "::1", "localhost", "0.0.0.0", socket.gethostname())

def watched(event, values):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        what = values[1]
        outside = isinstance(what, tuple) and what[0] not in OWN
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        what = values[0]
        outside = what not in OWN
    else:
        return
    with open(log, "a") as file:
        print("outside" if outside else "inside", event, what, file=file)
    if outside:
        raise OSError(f"the demo reaches out: {what}")

sys.addaudithook(watched)
from captum_vz.cli import main
raise SystemExit(main(["demo", *arguments]))
"""


class Demo:
    """A running demo: its address, and what it has tried to reach."""

    def __init__(self, url: str, log: Path, errors: Path) -> None:
        self.url, self.log, self.errors = url, log, errors

    def reached(self, where: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(where)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("demo")
    log = folder / "reached.txt"
    command = [sys.executable, "-c", PROGRAM, str(log)]
    # The environment of a user who has set nothing: neither Gradio's analytics nor the hub are switched off.
    off = ("GRADIO_ANALYTICS_ENABLED", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")
    environment = {name: value for name, value in os.environ.items() if name not in off}
    with (
        (folder / "err.txt").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), (folder / "err.txt").read_text()
            yield Demo(url, log, folder / "err.txt")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


class Visit:
    """A page of the demo, with what it asked for and its errors."""

    def __init__(self, browser: Any, demo: Demo) -> None:
        self.context = context_of(browser, viewport={"width": 1200, "height": 1000})
        self.outside: list[str] = []
        self.wrong: list[str] = []
        self.context.route(re.compile(r"^(?!data:|blob:|about:)"), self._route)
        self.own = demo.url.rstrip("/") + "/"
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on(
            "websocket", lambda socket: socket.url.split("/")[2] in self.own or self.outside.append(socket.url)
        )
        self.ended = 0
        for event in ("requestfinished", "requestfailed"):
            self.page.on(event, self._count)
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.open()

    def _route(self, route: Any) -> None:
        if route.request.url.startswith(self.own):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def _count(self, request: Any) -> None:
        self.ended += "/queue/data" in request.url

    def open(self, query: str = "") -> None:
        """Open the page, and wait for the answer that it has without a click."""
        with self._answer():
            self.page.goto(self.own + query)

    def ask(self, button: str) -> None:
        """Click, and wait for the answer to this click: an older one with the same words may stand there."""
        with self._answer():
            self.page.locator(button).click()

    @contextlib.contextmanager
    def _answer(self) -> Iterator[None]:
        """Gradio reads answers from a stream, which the server or the page ends when none is left to come."""
        before = self.ended
        yield
        for _ in range(20 * SECONDS):
            if self.ended > before:
                break
            self.page.wait_for_timeout(50)  # events are seen meanwhile
        assert self.ended > before, "there is no answer"
        self.page.wait_for_function("!document.querySelector('.generating, .pending')")
        at_rest(self.page)

    def frame(self, where: str) -> Any:
        """The interactive view in a part of the page."""
        inner = self.page.frame_locator(f"#{where} iframe")
        inner.locator("body[data-ready]").wait_for()
        return inner


@pytest.fixture
def visit(browser: Any, demo: Demo) -> Iterator[Visit]:
    found = Visit(browser, demo)
    yield found
    found.context.close()
    assert found.outside == []
    assert found.wrong == []


def test_first_screen_has_an_answer(visit: Visit) -> None:
    """On a classroom's laptop, without a click and after one, the answer and the text are in sight."""
    page = visit.page
    page.set_viewport_size({"width": 1366, "height": 768})
    for label, sentence in (("paula", "engineers"), ("marcus", "pictures")):
        shown = visit.frame("view")
        frame = page.locator("#view iframe").bounding_box()
        flow = shown.locator(".flow").first.bounding_box()
        assert flow["y"] + flow["height"] <= 768, (frame, flow)
        assert page.locator("#explain-options").get_by_label("Token").is_visible() is False
        page.locator("#examples button").filter(has_text=label).click()
        shown.get_by_role("heading").filter(has_text=sentence).first.wait_for()
        at_rest(page)
    flow = shown.locator(".flow").first.bounding_box()
    assert flow["y"] + flow["height"] <= 768


def test_continued_text_is_in_sight(visit: Visit) -> None:
    """The tab opens with an answer, whose view says where it comes from. Only the text stands above it."""
    page = visit.page
    page.get_by_role("tab", name="Continue a text").click()
    for width, height in ((1366, 768), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        shown = visit.frame("generated-view")
        at_rest(page)
        assert page.locator("#count").is_visible() is False
        answer = shown.locator(".answer").bounding_box()
        assert answer["y"] + answer["height"] <= height
    assert re.search("model: causal.*weights: sha256", shown.locator("footer").inner_text())
    assert "value-zeroing-rollout, residual 0.5" in shown.locator("#sub").inner_text()


def test_answer_stands_under_its_own_text_only(visit: Visit) -> None:
    page = visit.page
    visit.frame("view")
    page.locator("#text input, #text textarea").press_sequentially("x")
    page.locator("#view iframe").wait_for(state="detached")
    page.locator("#told", has_text="Press Enter").wait_for()
    page.locator("#text input, #text textarea").fill("some hat [MASK] small.")
    page.keyboard.press("Enter")
    assert visit.frame("view").get_by_role("heading", level=1).inner_text() == "some hat [MASK] small."


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("field", ["text", "prompt"])
def test_long_text_is_whole_and_in_sight(field: str, width: int, visit: Visit) -> None:
    """The box of a pasted text grows to some lines, which scroll down and not sideways. Enter still asks."""
    page, text = visit.page, "the pictures of some hat\n" * 200
    page.set_viewport_size({"width": width, "height": 740})
    if field == "prompt":
        page.get_by_role("tab", name="Continue a text").click()
    box, button = page.locator(f"#{field} textarea"), page.locator("button.primary:visible")
    before = box.bounding_box()["height"]
    box.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(text)
    page.wait_for_function("box => box.clientHeight > 150", arg=box.element_handle())
    assert box.input_value() == text
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth && box.scrollHeight > 10 * box.clientHeight")
    assert before < 70
    assert button.bounding_box()["height"] < 70
    page.keyboard.press("Enter")
    page.get_by_text("The text has 5000 characters: this page takes at most 2048. Shorten it.").wait_for()
    assert box.input_value() == text


def test_explain(visit: Visit) -> None:
    page = visit.page
    visit.ask("#explain")
    assert page.get_by_text("Explained: [MASK], position 6.").is_visible()
    view = visit.frame("view")
    assert view.locator(".flow button").get_by_text("pictures", exact=True).first.is_visible()
    for tab, picture in (("Methods", "methods-picture"), ("Layers", "layers-picture")):
        page.get_by_role("tab", name=tab).click()
        image = page.locator(f"#{picture} img").first
        image.wait_for()
        page.wait_for_function("one => one.complete && one.naturalWidth > 300", arg=image.element_handle())
        assert re.search(r"\[MASK\].*pictures 0\.\d\d", image.get_attribute("alt"))
    page.get_by_role("tab", name="Downloads").first.click()
    links = page.locator("#files a[href]")
    links.first.wait_for()
    addresses = links.evaluate_all("all => all.map((one) => one.href)")
    assert {Path(one).name for one in addresses} >= {"page.html", "layers.png", "methods.csv", "maps.json"}
    assert all(one.startswith(visit.own) for one in addresses)
    for address in addresses:
        answer = page.request.get(address)
        assert answer.ok
        assert len(answer.body()) > 100


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(theme: str, visit: Visit) -> None:
    page = visit.page
    visit.open(f"?__theme={theme}")  # the answer on load is the only one: no picture goes away again
    page.get_by_text("Explained: [MASK], position 6.").wait_for()
    visit.frame("view")
    page.mouse.move(5, 5)
    for tab in ("Interactive", "Methods", "Layers", "Downloads"):
        page.get_by_role("tab", name=tab, exact=True).first.click()
        if tab in ("Methods", "Layers"):  # Gradio's place of a picture that is not there yet has a fault
            page.locator(f"#{tab.lower()}-picture img").first.wait_for()
        at_rest(page)  # colors change slowly
        assert not violations(page), tab
    page.get_by_role("tab", name="Continue a text").click()
    visit.ask("#continue")
    visit.frame("generated-view")
    for tab in ("Interactive", "Picture", "Downloads"):
        page.get_by_role("tab", name=tab, exact=True).first.click()  # those of "Explain" are hidden
        at_rest(page)
        assert not violations(page), tab


def test_narrow_page(visit: Visit) -> None:
    """On a phone, nothing but tables scrolls sideways, and the answer comes into view."""
    page = visit.page
    page.set_viewport_size({"width": 360, "height": 740})
    visit.ask("#explain")
    assert page.get_by_text("Explained: [MASK], position 6.").is_visible()
    visit.frame("view")
    page.wait_for_function("document.querySelector('#told').getBoundingClientRect().top < innerHeight")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#view iframe").bounding_box()["width"] > 260


def test_image_of_a_model_of_images(visit: Visit, tmp_path: Path) -> None:
    """A file stands in the place of the text. It is forgotten as any other answer."""
    for part in image_classifier():
        part.save_pretrained(tmp_path / "model")
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(tmp_path / "image.png")
    page = visit.page
    page.locator("#explain-options button").first.click()
    model = page.locator("#model input")
    model.fill(str(tmp_path / "model"))
    model.press("Enter")
    visit.ask("#explain")
    assert "takes an image: choose a file in the options" in page.locator("#told [role=alert]").inner_text()
    page.locator("#file input[type=file]").set_input_files(tmp_path / "image.png")
    page.get_by_text("Press Enter or the button for an answer.").wait_for()
    visit.ask("#explain")
    assert "Explained: [CLS], position 0." in page.locator("#told [role=status]").inner_text()
    assert "patch 0,0" in visit.frame("view").locator("body").inner_text()
    page.get_by_role("tab", name="Methods").first.click()
    # The picture may load after the tab is shown.
    page.wait_for_function("(document.querySelector('#methods-picture img')?.naturalWidth ?? 0) > 500")


def test_hostile_text_is_text(visit: Visit) -> None:
    page = visit.page
    page.locator("#text input, #text textarea").fill(" ")
    visit.ask("#explain")
    assert page.locator("#told [role=alert]").inner_text().strip() == "The text is empty: write a sentence."
    page.locator("#text input, #text textarea").fill(f"{HOSTILE} [MASK]")
    visit.ask("#explain")
    visit.frame("view").get_by_role("heading", level=1).filter(has_text="window.hit").wait_for()
    assert "<script>window.hit=1</script> ${alert(1)}" in visit.frame("view").locator("body").inner_text()
    for tab in ("Methods", "Layers", "Downloads"):
        page.get_by_role("tab", name=tab).first.click()
    page.get_by_role("tab", name="Continue a text").click()
    page.locator("#prompt input, #prompt textarea").fill(HOSTILE)
    visit.ask("#continue")
    # The tab itself may ask for an answer when it opens, which the page shows first.
    told = page.locator("#generated [role=status]").filter(has_text="window.hit")
    told.wait_for()
    assert HOSTILE in told.inner_text()
    visit.frame("generated-view")
    at_rest(page)  # a picture that does not load runs its handler later
    for frame in page.frames:
        assert frame.evaluate("typeof window.hit") == "undefined"


def test_server_reaches_nothing(demo: Demo, browser: Any) -> None:
    visit = Visit(browser, demo)
    assert visit.page.locator("#view iframe").is_visible()  # the answer on load
    visit.ask("#explain")
    assert visit.page.get_by_text("Explained: [MASK], position 6.").is_visible()
    visit.context.close()
    assert demo.reached("inside")  # Gradio asks its own server whether it answers: the watch works
    assert demo.reached("outside") == []
    assert demo.errors.read_text() == ""
