"""Records are tested by what Captum draws, and pages by what a parser of HTML reads."""

import re
from html.parser import HTMLParser
from pathlib import Path

import torch
from captum.attr import visualization

from captum_vz.visualization import save_html, text_record

# What hides the brackets that Captum writes around a probability.
NOTHING = '<span hidden style="display:none"> ()'


class Page(HTMLParser):
    """The visible text of each cell, and the tags, of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.hidden = self.hidden or "hidden" in dict(attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        # The end of <b> closes what is open inside it, in every browser.
        self.hidden = self.hidden and tag not in ("b", "td", "span")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and not self.hidden:
            self.rows[-1][-1] += data


def drawn_by_captum(record: visualization.VisualizationDataRecord) -> str:
    return str(visualization.visualize_text([record], legend=False).data)


def test_record_colours_in_captum() -> None:
    html = drawn_by_captum(text_record(["a", "b", "c"], torch.tensor([[0.02, -0.04, 0.01]]), attr_class="by us"))
    colours = re.findall(r"hsl\((\d+), 75%, (\d+)%\)", html)
    assert colours == [("120", "75"), ("0", "60"), ("120", "88")]  # in Captum: 100 - 50 s above zero, 100 + 40 s below
    assert re.findall(r"<b>(.*?)</b>", html) == ["", NOTHING, "by us", "-0.01"]


def test_record_escapes_class_names() -> None:
    record = text_record(["a\nb\u202e"], torch.ones(1), attr_class="<b>x", true_class="<script>", pred_class="a & <i>")
    assert record.raw_input_ids == [r"a\nb\u202e"]
    html = drawn_by_captum(record)
    assert re.findall(r"<b>(.*?)</b>", html)[:3] == ["&lt;script&gt;", "a &amp; &lt;i&gt;" + NOTHING, "&lt;b&gt;x"]
    number = text_record(["a"], torch.ones(1), true_class=3)  # type: ignore[arg-type]  # Captum takes numbers too
    assert re.findall(r"<b>(.*?)</b>", drawn_by_captum(number))[0] == "3"


def test_unknown_probability_is_not_shown() -> None:
    unknown, known = text_record(["a"], torch.ones(1), pred_class="are"), text_record(["a"], torch.ones(1), pred_prob=0)
    rows = Page(str(visualization.visualize_text([unknown, known], legend=False).data)).rows
    cells = [row[1].strip() for row in rows if len(row) == 5][-2:]
    assert cells == ["are", "(0.00)"]


def test_page_holds_all_methods(tmp_path: Path) -> None:
    rows = {"一": torch.ones(3), "two": torch.zeros(3)}
    records = [text_record(["the", "<script>alert(1)</script>", "日本"], rows[name], attr_class=name) for name in rows]
    page = save_html(records, tmp_path / "page.html", title="A & B")
    assert (tmp_path / "page.html").read_bytes().isascii()
    read = Page((tmp_path / "page.html").read_text("ascii"))
    assert read.rows[0] == ["Attribution Label", "Attribution Score", "Word Importance"]  # the others have nothing
    assert [row[:2] for row in read.rows[1:]] == [["一", "3.00"], ["two", "0.00"]]
    assert read.rows[1][2].split() == ["the", "<script>alert(1)</script>", "日本"]
    assert "script" not in read.tags and "link" not in read.tags and "img" not in read.tags
    assert page.count("A &amp; B") == 2
