"""The scores of several methods for one token, with what blanking out each word does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.visualization._checks import one_example, position_of
from captum_vz.visualization.pictures.parts.layout import PAGE
from captum_vz.visualization.pictures.parts.panels import Chosen, Words, make_axis
from captum_vz.visualization.pictures.rows import Strips, draw_strips, explained_token, strips_content

CLEAR: Final = 4  # entries of a truth that are no noise, without which its order says nothing


def draw_comparison(
    scores: Mapping[str, Tensor],
    tokens: Sequence[str],
    token: int | None = None,
    label: str = "share",
    *,
    truth: Tensor | None = None,
    truth_name: str = "blanking out",
    scopes: Mapping[str, str] | None = None,
    families: Mapping[str, str] | None = None,
    words: Words = None,
    dim: Chosen = None,
    drop: Chosen = None,
    scale: str = "root",
    vmax: float | None = None,
    title: str | None = None,
    size: tuple[float, float] = PAGE,
    ax: Axes | None = None,
    fig: Figure | SubFigure | None = None,
) -> Figure:
    r"""Draws the scores of several methods for one token: methods down, tokens across.

    The first row can be a truth, such as what blanking out each token does to the prediction. At the right stands how
    far each method agrees with it, from 0 to 1, and in grey Kendall's rank correlation:

    .. math:: 1 - \tfrac12 \textstyle\sum_j \lvert s_j - b_j \rvert \qquad
        \tau_b = (P - Q) \big/ \sqrt{(P + Q + T)\,(P + Q + U)}

    with shares s of the method and b of the truth, which is 0 where it is NaN. P pairs of tokens are in the same order,
    Q in opposite order, T tied in the method only and U in the truth only. Tokens for which the truth is NaN do not
    count. The correlation is left out if fewer than four entries of the truth exceed a hundredth of the largest. With a
    truth, methods of a family are sorted by their agreement.

    Args:
        scores: From the names of methods to scores `(tokens,)` or `(1, tokens)`.
        tokens: The tokens.
        token: The position of the token that is explained. It is marked. Negative positions count from the end.
        label: The label of the colour scale.
        truth: Scores `(tokens,)`, NaN where there is no truth. None: there is no row of truth.
        truth_name: The name of that row.
        scopes: From names of methods to the layers that their scores are about, written after the name.
        families: From names of methods to families. Methods of a family stand together, families apart.
        words: Merges pieces to words, see :func:`draw_maps`. Scores of a word are added.
        dim: Tokens that are drawn pale and do not count for the scale: "special", or positions.
        drop: Tokens that are left out: "special", or positions.
        scale: "root": colours by the square root, so that one large score does not leave the others white; "row", where
            each row ends at its own largest score; or "shared".
        vmax: The end of the scale, with "shared" or "root". None: the largest score.
        title: A title. None: "What [MASK] draws on" if `token` is given.
        size: The width and height of the page in inches, such as (3.3, 3) for a column of a paper. The figure is no
            larger.
        ax: Axes to draw into.
        fig: A figure or a subfigure to draw into.

    Returns:
        A matplotlib figure: a new one, `fig`, or the figure of `ax`. `captum_vz.study.compare(...).plot()` makes it
        from a model and a text.

    Raises:
        ArgumentError: There is no method, scores do not fit the tokens, or an option has an unknown value.

    >>> rows = {"attention": torch.tensor([0.2, 0.3, 0.5]), "random": torch.tensor([0.4, 0.1, 0.5])}
    >>> truth = torch.tensor([0.1, 0.6, float("nan")])
    >>> figure = draw_comparison(rows, ["the", "pictures", "[MASK]"], token=2, truth=truth)
    >>> [text.get_text() for text in figure.axes[0].texts if "." in text.get_text()][:2]
    ['0.44', '0.24']
    """
    if not scores:
        raise ArgumentError("draw_comparison needs the scores of at least one method, got none.")
    position = position_of(token, tokens)
    axis = make_axis(tokens, words, dim, drop)
    given = None if truth is None else _checked_truth(truth, tokens)
    names = _ordered(scores, families or {}, tokens, given)
    rows = {name: axis.columns(one_example(scores[name], tokens, dimensions=1)) for name in names}
    groups: list[str | None] = [(families or {}).get(name, "") for name in names]
    labels = [", ".join(filter(None, [name, (scopes or {}).get(name)])) for name in names]
    notes: list[str] = []
    pale: list[str] = []
    lines = list(rows.values())
    if given is not None:
        known = axis.columns(given.isfinite().double()) > 0
        right = axis.columns(given.nan_to_num(nan=0.0)).masked_fill(~known, float("nan"))
        notes = ["", *(_two_digits(overlap(row, right)) for row in lines)]
        pale = ["", *(_two_digits(clear_tau(row, right)) for row in lines)]
        lines, labels, groups = [right, *lines], [truth_name, *labels], [None, *groups]
    marked, explained, title = explained_token(axis, tokens, position, title)
    heads = ("agrees", "τ" if any(pale) else "") if notes else ("", "")
    strips = Strips(labels, torch.stack(lines), axis.labels, marked, axis.dimmed, groups, notes, heads, pale)
    content = strips_content(strips, explained, label, "method")
    return draw_strips(strips, content, scale, vmax, label, title, size, ax, fig)


def kendall_tau(one: Tensor, other: Tensor) -> float:
    """Kendall's rank correlation of two rows, of the tokens for which both are numbers. NaN if one row has no order."""
    known = one.isfinite() & other.isfinite()
    first, second = ((row[known][:, None] - row[known]).sign() for row in (one.double(), other.double()))
    pairs = float(first.square().sum() * second.square().sum()) ** 0.5
    return float((first * second).sum()) / pairs if pairs else float("nan")


def overlap(shares: Tensor, truth: Tensor) -> float:
    """How much of two rows of shares lies on the same tokens, from 0 to 1. NaN if the truth is 0 everywhere.

    >>> overlap(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.8, float("nan")]))
    0.5
    """
    one, other = _shares(shares), _shares(truth)
    if not other.any():
        return float("nan")
    return round(1 - float((one - other).abs().sum()) / 2, 12)


def _shares(row: Tensor) -> Tensor:
    """The sizes of the entries as shares of their sum; 0 for NaN."""
    sizes = row.double().nan_to_num(nan=0.0).abs()
    return sizes / sizes.sum() if sizes.any() else sizes


def clear_tau(one: Tensor, truth: Tensor) -> float:
    """:func:`kendall_tau`, NaN if fewer than four entries of the truth exceed a hundredth of the largest."""
    sizes = truth.double().nan_to_num(nan=0.0).abs()
    clear = int((sizes > sizes.max() / 100).sum())
    return kendall_tau(one, truth) if clear >= CLEAR else float("nan")


def _two_digits(number: float) -> str:
    return f"{number:.2f}" if number == number else ""


def _ordered(
    scores: Mapping[str, Tensor], families: Mapping[str, str], tokens: Sequence[str], truth: Tensor | None
) -> list[str]:
    """The methods by families, in the order in which families occur; with a truth, those that agree most first."""
    order = list(dict.fromkeys(families.get(name, "") for name in scores))

    def place(name: str) -> tuple[int, float]:
        agrees = 0.0 if truth is None else overlap(one_example(scores[name], tokens, dimensions=1).cpu(), truth)
        return order.index(families.get(name, "")), -agrees if agrees == agrees else 0.0

    return sorted(scores, key=place)


def _checked_truth(truth: Tensor, tokens: Sequence[str]) -> Tensor:
    known = truth.nan_to_num(nan=0.0) if isinstance(truth, Tensor) else truth
    one_example(known, tokens, dimensions=1)
    return truth.detach().reshape(len(tokens)).double().cpu()
