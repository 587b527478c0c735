"""Draw the pictures that explain a page of text: python tutorials/images/explain_pages.py [NAME ...]

The numbers are those of the page: of its table, or of its code. `view` needs playwright and Chromium.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import captum_vz

IMAGES = Path(__file__).parent
DOCS = IMAGES.parent / "docs"
MEASURED = IMAGES.parents[1] / "tests" / "benchmarks" / "RESULTS.md"
SENTENCE = "the pictures of some hat [MASK] scaring marcus."
BLUE, PALE, MARK, GREY = "#08519c", "#9ecae1", "#d55e00", "0.55"
LENGTH = 64  # tokens of the texts whose times are drawn
BARS = {  # columns of the table of times
    "definition": ("definition: one more run of each layer for each token", GREY),
    "maps": ("maps", BLUE),
    "row": ("one row", PALE),
    "forward pass": ("one forward pass", "black"),
}


def blocks_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n((?s:.*?))^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE)


def times() -> dict[str, dict[str, float]]:
    """The seconds of each model for a text of `LENGTH` tokens, as the table of measurements has them."""
    table = MEASURED.read_text("utf-8").partition("## Times")[2].partition("\n| Model ")[2]
    lines = f"| Model {table}".partition("\n\n")[0].split("\n")
    heads, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found, model = {}, ""
    for row in rows:
        named = dict(zip(heads, row, strict=True))
        model = named["Model"] or model
        if named["Tokens"] == str(LENGTH):
            found[model] = {name: float(named[name]) for name in BARS}
    return found


def speed() -> Figure:
    """How long maps take, by their definition and as the package computes them."""
    figure = Figure((7.5, 3.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    found = times()
    for place, (name, (label, color)) in enumerate(BARS.items()):
        at = [model + 0.2 * (place - 1.5) for model in range(len(found))]
        bars = axes.barh(at, [one[name] for one in found.values()], 0.18, label=label, color=color)
        axes.bar_label(bars, padding=3, fontsize=7)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds")
    axes.set_title(f"Maps of all layers for a text of {LENGTH} tokens, two cores", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return figure


def reports() -> dict[str, Any]:
    """What the code of the page on `verify` verifies: the embedded model, a decoder, and a model that is wrong."""
    found, session = [], {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks_of("verify.md"):
            exec(compile(block, "verify.md", "exec"), session)
            found.append(session["report"])
    return dict(zip(("embedded model", "decoder in bfloat16", "model that is wrong"), found, strict=True))


def verify() -> Figure:
    """The checks of three models: how large their differences are, as shares of what is allowed."""
    found = reports()
    checks = [one for report in found.values() for one in report.checks if one.allowed]
    names = list(dict.fromkeys(one.name for one in checks))
    figure = Figure((7.5, 3.4), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(found), sharey=True, sharex=True)
    for axes, (model, report) in zip(panels, found.items(), strict=True):
        axes.axvspan(1, 1e4, color=MARK, alpha=0.12, linewidth=0)
        axes.axvline(1, color=MARK)
        for place, name in enumerate(names):
            worst = max((one.excess for one in report.checks if one.name == name and one.allowed), default=None)
            if worst is None:
                axes.text(1.2e-8, place, "skipped", fontsize=7, color=GREY, va="center")
                continue
            color = MARK if worst > 1 else BLUE
            axes.plot([1e-8, max(worst, 1e-8)], [place, place], color=color, linewidth=1)
            axes.plot(max(worst, 1e-8), place, "o", color=color, clip_on=False)
        axes.set_xscale("log")
        axes.set_xlim(8e-9, 1e4)
        axes.set_xticks([1e-8, 1e-4, 1], ["0", "0.0001", "limit"])
        axes.minorticks_off()
        verdict = report.verdict.partition(":")[0]
        axes.set_title(f"{model}: {verdict}", fontsize=9, color="black" if report.passed else MARK)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    figure.supxlabel("largest difference, as a share of what is allowed", fontsize=9)
    return figure


def choosing() -> Figure:
    """Two rows with a large share, of which one is a large change."""
    from captum_vz import ValueZeroing, find_layers
    from captum_vz.testbed import load_model

    model, tokenizer = load_model()
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    tokens, layers = inputs.tokens(), find_layers(model)
    figure = Figure((7.5, 3.6), layout="constrained", dpi=150)
    titles = ("share of the row (default)", "distance (normalize=False)")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, normalize, title in zip(panels, (True, False), titles, strict=True):
        for layer, token, shift, color in ((0, 2, -0.2, PALE), (3, 6, 0.2, BLUE)):
            row = ValueZeroing(model, layers[layer], normalize=normalize).attribute(inputs, token=token)[0]
            at = [place + shift for place in range(len(tokens))]
            label = f"row of {tokens[token]}, layer {layer}"
            bars = axes.barh(at, row.tolist(), 0.38, color=color, label=label)
            largest = f"{row.max():.2f}" if normalize else f"{row.max():.3f}"
            axes.bar_label(bars, [largest if one == row.max() else "" for one in row], padding=3, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.15)
        axes.locator_params(axis="x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(tokens)), tokens)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def captum_scripts() -> Figure:
    """Captum's method and two of this package on the same model, text and target."""
    from captum.attr import LayerIntegratedGradients

    from captum_vz import ValueZeroing, ValueZeroingEffect, find_layers
    from captum_vz.testbed import load_model
    from captum_vz.visualization import draw_comparison

    model, tokenizer = load_model()
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    ids, tokens = inputs["input_ids"], inputs.tokens()
    target = tokens.index("[MASK]"), tokenizer.convert_tokens_to_ids("are")

    def forward_func(ids: Any) -> Any:
        return model(ids).logits

    layers = find_layers(model)
    methods = {
        "LayerIntegratedGradients (Captum)": LayerIntegratedGradients(forward_func, model.get_input_embeddings()),
        "ValueZeroing, layer 3": ValueZeroing(forward_func, layers[-1]),
        "ValueZeroingEffect": ValueZeroingEffect(forward_func, layers),
    }
    rows = {}
    for name, method in methods.items():
        found = method.attribute(ids, target=target)
        scores = (found.sum(-1) if found.dim() > 2 else found)[0].detach().abs()
        rows[name] = scores / scores.sum()
    title = 'One model, one text, target: "are" at [MASK]'
    return draw_comparison(rows, tokens, target[0], "share of the absolute scores", title=title)


def view() -> bytes:
    """The first page of the site shows this view."""
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder, "view.html")
        captum_vz.explain("agreement", SENTENCE).view(title=SENTENCE).save(path)
        with contextlib.closing(playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])) as opened:
            page = opened.new_page(viewport={"width": 880, "height": 660}, device_scale_factor=1.5)
            page.goto(path.as_uri())
            page.wait_for_selector("body[data-ready]")
            return page.screenshot()


PICTURES: dict[str, Callable[[], Any]] = {one.__name__: one for one in (speed, verify, choosing, captum_scripts, view)}


def main(names: list[str], folder: Path = IMAGES) -> None:
    """Draw the pictures of these names, or all."""
    for name in names or PICTURES:
        drawn = PICTURES[name]()
        if isinstance(drawn, bytes):
            (folder / f"{name}.png").write_bytes(drawn)
        else:
            drawn.savefig(folder / f"{name}.png", metadata={"Software": f"captum_vz {captum_vz.__version__}"})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv[1:])
