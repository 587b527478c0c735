"""Draw the first picture of the README: python tutorials/images/first.py

Above, the embedded model. Left: the row of `[MASK]` in each layer, and what blanking out each word does to the answer.
Right: the share of the cue in the row of each method, over sentences of the package's own grammar.
Below, SmolLM2. Left: on which words an answer rests, and rows of the last word. Right: its rows in all layers, with the
layer that decides in a frame. All numbers are computed.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor

from captum_vz import explain
from captum_vz.study import METHODS, Example, Method, compare, run_study
from captum_vz.testbed import agreement_sentences

PICTURE = Path(__file__).with_name("first.png")
SENTENCE, TARGET, FOIL = "the pictures of some hat [MASK] scaring marcus.", "are", "is"
REAL, ANSWER, OTHER = "As everybody knows, the capital of Russia is", "Moscow", "Athens"
MARK, GREY = "#d55e00", "#6b7280"
#: The methods on the right, as the picture names them.
COMPARED: dict[str, Method] = {
    "Value Zeroing": METHODS["value-zeroing"],
    "attention norms": METHODS["attention-norm"],
    "attention": METHODS["attention"],
    "ALTI": METHODS["alti"],
    "rollout, residual 0.5": METHODS["value-zeroing-rollout"],
    "random": METHODS["random"],
}


def rows() -> tuple[list[str], int, dict[str, list[float]]]:
    """The words, the place of the mask, and its row in each layer and in the truth."""
    found = explain("agreement", SENTENCE)
    truth = compare("agreement", SENTENCE, "random", TARGET, foil=FOIL, truth=True).truth
    assert found.token is not None and truth is not None
    kept = [place for place, special in enumerate(found.special) if not special and found.tokens[place] != "."]
    shown = {f"layer {number}": one[found.token, kept].tolist() for number, one in enumerate(found.maps)}
    shown["truth*"] = truth[kept].nan_to_num(nan=0.0).tolist()
    return [found.tokens[place] for place in kept], kept.index(found.token), shown


def shares(count: int = 260, metric: str = "cue_dot") -> dict[str, float]:
    """The mean share of the cue in the row of each method, in the last layer; another metric of the same rows."""
    examples = [Example.from_record(record) for record in agreement_sentences(count)]
    with tempfile.TemporaryDirectory() as folder:
        study = run_study("agreement", examples, Path(folder, "study"), COMPARED, [metric], quiet=True)
        summary = study.summary
    last = summary[(summary["group"] == "all") & (summary["layer"].isna() | (summary["layer"] == 3))]
    means = last.set_index("method")["mean"]
    return {name: float(means[name]) for name in COMPARED}


def real() -> tuple[list[str], Tensor, int, dict[str, list[float]]]:
    """The words of the real text, the rows of all layers, the layer that decides, and the rows on the left."""
    found = explain("smollm2", REAL, target=ANSWER, foil=OTHER, words=True)
    decision, maps = found.parts["decision"], found.parts["value-zeroing"]
    rolled = explain("smollm2", REAL, method="value-zeroing-rollout", words=True).rows[0].scores
    layers, layer = maps.scores[0], maps.layer
    assert layer is not None
    shown = {f"layer {layer}": layers[layer], f"layer {len(layers) - 1}": layers[-1], "rollout": rolled}
    shown["decision*"] = decision.shares
    return [word.strip() for word in found.tokens], layers, layer, {name: row.tolist() for name, row in shown.items()}


def draw(path: Path = PICTURE, count: int = 260) -> None:
    """Draw the picture into a file."""
    fig = Figure(figsize=(9.6, 7.4), dpi=150)
    left, right = fig.add_axes((0.0, 0.48, 0.63, 0.52)), fig.add_axes((0.775, 0.615, 0.185, 0.26))
    words, mask, numbers = rows()
    told = "Rows of [MASK] by Value Zeroing: zero the value of a word, measure how far [MASK] moves."
    truth = f"* Blank out a word: how much of the lead of “{TARGET}” over “{FOIL}” goes with it."
    asked = f"Which word decides between “{TARGET}” and “{FOIL}”?"
    draw_words(left, asked, words, mask, numbers, (told, truth))
    draw_bars(right, shares(count), count)
    left, right = fig.add_axes((0.0, 0.0, 0.63, 0.48)), fig.add_axes((0.735, 0.08, 0.225, 0.32))
    words, layers, layer, numbers = real()
    told = f"Rows of “{words[-1]}” by Value Zeroing in SmolLM2. The last layer shows the first and the last word."
    rests = f"* What the lead of “{ANSWER}” over “{OTHER}” rests on. No layer reads more of it than layer {layer}."
    asked = f"Which layer decides between “{ANSWER}” and “{OTHER}”?"
    draw_words(left, asked, words, len(words) - 1, numbers, (told, rests))
    draw_layers(right, words, layers, layer)
    fig.savefig(path, metadata={"Software": None})


def draw_words(
    ax: Axes, asked: str, words: Sequence[str], own: int, numbers: Mapping[str, Sequence[float]], told: Sequence[str]
) -> None:
    """The words of each row, on a colour for their share. The last row is a truth."""
    ax.set_axis_off()
    ax.set(xlim=(-1.3, len(words) + 0.1), ylim=(len(numbers) + 2.1, -1.0))
    ax.text(-1.25, -0.5, asked, size=14, weight="bold", va="center")
    blues, cue = colormaps["Blues"], int(torch.tensor(list(numbers.values())[-1]).argmax())
    for number, (name, row) in enumerate(numbers.items()):
        y = number + 0.3 * name.endswith("*")
        bold = "bold" if row[cue] > 0.9 else None
        ax.text(-0.12, y + 0.42, name, size=9, ha="right", va="center", weight=bold)
        for place, (word, share) in enumerate(zip(words, row, strict=True)):
            edge = {"ec": MARK, "lw": 1.6} if place == own else {"ec": "#d1d5db", "lw": 0.7}
            box = FancyBboxPatch((place + 0.04, y), 0.92, 0.84, boxstyle="round,pad=0,rounding_size=0.12", **edge)
            box.set_facecolor("white" if place == own else blues(share**0.5))
            ax.add_patch(box)
            ink = "white" if share > 0.3 and place != own else "black"
            tell, size = share >= 0.05 and place != own, min(8.5, 68 / len(word))
            ax.text(place + 0.5, y + (0.3 if tell else 0.42), word, size=size, color=ink, ha="center", va="center")
            if tell:
                ax.text(place + 0.5, y + 0.64, f"{share:.2f}", size=7, color=ink, ha="center", va="center")
    end = len(numbers) + 0.55
    for number, line in enumerate(told):
        ax.text(-1.25, end + 0.2 + 0.45 * number, line, size=8, color=GREY, va="center")


def draw_layers(ax: Axes, words: Sequence[str], layers: Tensor, layer: int) -> None:
    """The rows of all layers, without the first word and the word itself, and a frame around the layer that decides."""
    shown = words[1:-1]
    ax.imshow(layers[:, 1:-1], cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ax.add_patch(Rectangle((-0.5, layer - 0.5), len(shown), 1, fill=False, ec=MARK, lw=1.6))
    ax.set_xticks(range(len(shown)), shown, size=8.5, rotation=35, ha="right", rotation_mode="anchor")
    ax.set_yticks([0, 10, layer, len(layers) - 1], ["layer 0", "10", f"layer {layer}", len(layers) - 1], size=8.5)
    ax.tick_params(length=0)
    ax.spines[:].set_color("#d1d5db")
    ax.set_title(f"All {len(layers)} layers,\nwithout the first word and “{words[-1]}”", size=9, loc="left")


def draw_bars(ax: Axes, found: Mapping[str, float], count: int) -> None:
    """The share of the deciding word by method."""
    colours = ["#08519c", *["#9ca3af"] * (len(found) - 1)]
    bars = ax.barh(range(len(found)), list(found.values()), color=colours, height=0.66)
    ax.bar_label(bars, [f"{share:.2f}" for share in found.values()], padding=3, size=8.5)
    ax.set_yticks(range(len(found)), list(found), size=8.5)
    ax.set(ylim=(len(found) - 0.5, -0.5), xlim=(0, 1), xticks=[])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(f"Share on the word that decides:\nlast layer, {count} sentences", size=9, loc="left", x=-0.62)


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw()
    print(PICTURE.name)
