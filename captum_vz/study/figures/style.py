"""How methods look in all figures of studies: one colour for a family, one mark and one place for each method."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from captum_vz._files import write_whole
from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.methods import METHODS
from captum_vz.study.scoring.measuring import Metric
from captum_vz.study.scoring.metrics import metric_named
from captum_vz.visualization.pictures.files import Content, Picture, root_figure, set_content
from captum_vz.visualization.pictures.scales import luminance

with needs_extra("captum_vz.study", "study"):
    from scipy.optimize import isotonic_regression

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

#: The width of one column in print, in inches, and the size of the letters in it, in points.
COLUMN: Final = 3.3
FONT: Final = 6.5
#: The height of a row with a method's name, in inches.
ROW: Final = 0.12
#: What points and bars show.
LAST_LAYER: Final = "last layer"

# The palette of Okabe & Ito (2008), whose hues differ for readers without red or green vision too. Yellow is too light
# for lines on white. Methods of a family differ by their marks.
_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "#0072b2": (
        "value-zeroing",
        "value-zeroing-rollout",
        "value-zeroing-effect",
        "value-zeroing-effect-layer",
        "value-zeroing-shapley",
        "value-zeroing-integrated",
        "value-zeroing-rollout-paper",
    ),
    "#e69f00": ("attention", "attention-rollout", "attention-flow", "attention-gradient", "attention-rollout-paper"),
    "#009e73": ("attention-norm", "attention-norm-rollout", "globenc", "globenc-layer"),
    "#cc79a7": ("alti", "alti-layer", "alti-logit"),
    "#d55e00": (
        "saliency",
        "input-x-gradient",
        "integrated-gradients",
        "hidden-token-attribution",
        "input-x-gradient-l2",
        "integrated-gradients-l2",
        "attn-lrp",
    ),
    "0.35": ("random", "position"),
}
_OWN: Final = "#56b4e9"  # methods of the user's own
_MARKS: Final = ("o", "s", "^", "D", "v", "P", "<")
_CONTROL_MARKS: Final = ("x", "+")  # both are seen where their lines are one
# The least contrast of small text with its ground, by WCAG 2.
_CONTRAST: Final = 4.5


def new_figure(height: float, width: float = COLUMN) -> Figure:
    """A figure of a size in inches that keeps its description with its file. The layout is made for its texts."""
    return Picture(figsize=(width, height), dpi=200, layout="constrained")


def stacked(heights: Sequence[float], width: float = COLUMN, models: int = 1) -> list[Axes]:
    """Axes below each other for each model, in a new figure, whose height would else soon be more than a page's.

    Two models stand side by side, the next two below them. Axes have subfigures of their own, so that no names narrow
    another's axes.

    Args:
        heights: The heights of the axes of a model with their names and titles, in inches.
        width: The width of a model's axes in inches.
        models: The number of models.

    Returns:
        The axes of the first model, then those of the second, and so on.
    """
    across = min(models, 2)
    down = -(-models // across)
    figure: Any = new_figure(down * sum(heights), across * width)
    found = []
    for cell in figure.subfigures(down, across, squeeze=False).flat[:models]:
        parts = cell.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)
        found += [part.subplots() for part in parts[:, 0]]
    return found


def whole_figure(panels: Sequence[Axes]) -> Figure:
    """The figure that holds panels of :func:`stacked`."""
    return root_figure(panels[0].figure)


def write_figure(figure: Figure, path: Path, kinds: Sequence[str] = ("png",)) -> None:
    """Write a finished figure into a file of each kind, each whole or not at all. It is laid out once for all of them.

    Args:
        figure: The figure. It keeps this layout.
        path: Where the files are, without their suffix.
        kinds: Formats of matplotlib, which are the suffixes too.
    """
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    for kind in kinds:
        picture = BytesIO()
        figure.savefig(picture, format=kind)
        write_whole(path.with_name(f"{path.name}.{kind}"), picture.getvalue())


def method_color(method: str) -> str:
    """The colour of a method's family."""
    return next((color for color, family in _FAMILIES.items() if method in family), _OWN)


def method_mark(method: str) -> str:
    """The mark of a method, which differs from those of its family."""
    for family in _FAMILIES.values():
        if method in family:
            return (_CONTROL_MARKS if "random" in family else _MARKS)[family.index(method)]
    # The mark of a method of the user's own depends on its name only, so that it is the same in every process.
    return _MARKS[crc32(method.encode()) % len(_MARKS)]


def label_color(method: str) -> tuple[float, float, float]:
    """The colour of a method for text on white: the same hue, as dark as small letters need."""
    color = to_rgb(method_color(method))
    while 1.05 / (luminance(color) + 0.05) < _CONTRAST:
        red, green, blue = color
        color = (0.95 * red, 0.95 * green, 0.95 * blue)
    return color


def mark_of(method: str) -> dict[str, Any]:
    """How matplotlib draws a method's mark: filled for a single layer, else hollow."""
    color = method_color(method)
    return {
        "marker": method_mark(method),
        "color": color,
        "markerfacecolor": color if is_single_layer(method) else "white",
        "markeredgecolor": color,
        "markersize": 3.6,
        "markeredgewidth": 0.9,
    }


def is_single_layer(method: str) -> bool:
    """Whether a registered method shows each layer by itself: it has layers, and does not join them."""
    known = METHODS.get(method)
    return known is not None and known.layered and not known.joins


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods in their order in all figures: families together, those of the user's own after them, controls last."""
    families = [name for family in _FAMILIES.values() for name in family]
    first, last = families[:-2], families[-2:]
    given = list(dict.fromkeys(methods))
    own = [name for name in given if name not in families]
    return [name for name in [*first, *own, *last] if name in given]


def known_metric(metric: str) -> Metric | None:
    """The registered metric of a name. None: only its caller knows it."""
    try:
        return metric_named(metric)
    except ArgumentError:
        return None


def metric_title(metric: str) -> str:
    """The name of a metric in a figure."""
    known = known_metric(metric)
    return metric if known is None else known.title


def last_layers(rows: DataFrame) -> DataFrame:
    """For each method the row of its last layer, or its only row, in the order of all figures."""
    last = rows.groupby("method", sort=False).tail(1)
    order = {name: place for place, name in enumerate(in_order(last["method"]))}
    return last.sort_values("method", key=lambda names: names.map(order))


def panel_title(*parts: str) -> str:
    """A title of model, data and what a panel shows; parts that are empty are left out."""
    return ", ".join(filter(None, parts))


def write_title(panel: Axes, title: str, width: float = COLUMN) -> None:
    """Write a title as plain text across the figure or subfigure of a panel, in lines that its width in inches holds.

    Lines end at line breaks too.
    """
    letters = int((width - 0.15) * 72 / (0.57 * FONT))
    lines = [line for part in title.split("\n") for line in textwrap.wrap(part, letters)]
    figure: Any = panel.figure
    figure.suptitle("\n".join(lines), fontsize=FONT).set_parse_math(False)  # a model's name may hold dollar signs


def set_table(panel: Axes, sentence: str, rows: DataFrame, columns: Sequence[str]) -> None:
    """Describe a panel for readers who cannot see it: a sentence, and the table of its numbers."""
    names = list(columns)
    set_content(panel, Content(sentence, tuple(names), lambda: list(rows[names].itertuples(index=False, name=None))))


def length_of(names: Iterable[str]) -> float:
    """The length of the longest of some names in inches, about."""
    return max((len(line) for name in names for line in name.split("\n")), default=0) * 0.57 * FONT / 72


def name_methods(panel: Axes, methods: Sequence[str]) -> None:
    """Name the rows of a panel, the first at the top, in the colours of the methods."""
    panel.set_yticks(range(len(methods)), methods)
    panel.set_ylim(len(methods) - 0.4, -0.6)
    panel.tick_params(labelsize=FONT, length=2)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", alpha=0.3, linewidth=0.5)
    panel.set_axisbelow(True)
    for label, method in zip(panel.get_yticklabels(), methods, strict=True):
        label.set_color(label_color(method))


def draw_points(panel: Axes, rows: DataFrame, value: str = "mean") -> None:
    """A point with its interval in each row, and the methods' names: families are together, in the order given.

    Args:
        panel: The axes.
        rows: ``method``, the value, ``low`` and ``high``; NaN where there is none.
        value: The column of the value.
    """
    for place, row in enumerate(rows.itertuples()):
        method = str(row.method)
        if row.low == row.low:  # a single example has no interval
            panel.hlines(place, row.low, row.high, color=method_color(method), linewidth=1.1)
        panel.plot(getattr(row, value), place, linestyle="", **mark_of(method))
    name_methods(panel, list(rows["method"]))


def share_limits(panels: Sequence[Axes], axis: str) -> None:
    """Give panels one scale on their axis "x" or "y", so that they can be compared by eye."""
    limits = [getattr(panel, f"get_{axis}lim")() for panel in panels]
    for panel in panels:
        getattr(panel, f"set_{axis}lim")(min(low for low, _ in limits), max(high for _, high in limits))


def label_ends(panel: Axes, ends: Mapping[str, tuple[float, float]], height: float) -> None:
    """Write the methods' names at the right of a panel, joined with their lines' ends, so that no two overlap.

    Args:
        panel: The axes, with their limits set.
        ends: For each method the place where its line ends.
        height: The height of the axes in inches.
    """
    if not ends:
        return
    low, high = panel.get_ylim()
    gap = 1.15 * FONT / 72 / height * (high - low)
    heights = [height for _, height in ends.values()]
    for method, place in zip(ends, _apart(heights, (low, high), gap), strict=True):
        color = label_color(method)
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5)}
        at: Any = panel.get_yaxis_transform()
        panel.annotate(method, ends[method], (1.09, place), "data", at, line, color=color, fontsize=FONT, va="center")


def _apart(ends: Sequence[float], limits: tuple[float, float], gap: float) -> list[float]:
    """Heights of labels as near the ends of their lines as they can be without overlaps: an isotonic regression.

    >>> _apart([0.0, 0.0, 1.0], (-1.0, 1.0), 0.25)
    [-0.125, 0.125, 0.875]
    """
    low, high = limits
    gap = min(gap, (high - low) / len(ends))
    order, steps = np.argsort(ends, kind="stable"), gap * np.arange(len(ends))
    lowest = isotonic_regression(np.asarray(ends)[order] - steps).x
    placed = np.empty(len(ends))
    placed[order] = np.clip(lowest, low + gap / 2, high - gap / 2 - steps[-1]) + steps
    found: list[float] = placed.tolist()
    return found
