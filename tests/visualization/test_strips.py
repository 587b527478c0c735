"""Strips of rows: one token layer by layer, and several methods beside a truth."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from captum_vz.functional.scores import kendall_tau, overlap
from captum_vz.visualization import draw_comparison, draw_row
from captum_vz.visualization.pictures.rows import clear_tau

TOKENS = ["[CLS]", "the", "cats", "[MASK]"]


def drawn(figure: Figure) -> torch.Tensor:
    """The rows from top to bottom."""
    images = sorted(figure.axes[0].images, key=lambda image: image.get_extent()[3])
    return torch.cat([torch.as_tensor(np.ma.filled(image.get_array(), np.nan)) for image in images])


def names(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("form", ["tensor", "list", "maps"])
def test_rows_in_any_form(form: str) -> None:
    maps = torch.rand(3, 4, 4)
    given = {"tensor": maps[:, 3], "list": [row[None] for row in maps[:, 3]], "maps": list(maps[:, None])}[form]
    figure = draw_row(given, TOKENS, token=-1)
    torch.testing.assert_close(drawn(figure), maps[:, 3].double())
    assert names(figure) == ["layer 0", "layer 1", "layer 2"]
    assert figure.get_suptitle() == "What [MASK] draws on"
    (mark,) = [patch for patch in figure.axes[0].patches if patch.get_linewidth() > 1]
    assert mark.get_x() == 2.5


def test_cells_have_numbers() -> None:
    figure = draw_row([torch.tensor([0.004, 0.25, 0.5, 1.0]), torch.tensor([0.0, -0.25, 0.0, 0.0])], TOKENS)
    assert written(figure) == [".25", ".50", "1.00", "-.25"]


def test_row_options() -> None:
    row = torch.tensor([0.7, 0.1, 0.1, 0.1])
    assert draw_row([row], TOKENS, dim="special").axes[0].images[0].norm.vmax == pytest.approx(0.1)
    torch.testing.assert_close(drawn(draw_row([row], TOKENS, drop="special"))[0], row[1:].double())
    merged = draw_row([row], ["[CLS]", "the", "##se", "cats"], words=True)
    torch.testing.assert_close(drawn(merged)[0], torch.tensor([0.7, 0.2, 0.1]).double())
    both = draw_row([row, row * 0.5], TOKENS, scale="row")
    assert {round(image.norm.vmax, 3) for image in both.axes[0].images} == {0.7, 0.35}


def test_truth_is_the_first_row() -> None:
    truth = torch.tensor([float("nan"), 0.1, 0.9, float("nan")])
    scores = {"good": torch.tensor([0.5, 0.1, 0.3, 0.1]), "bad": torch.tensor([[0.1, 0.7, 0.1, 0.1]])}
    figure = draw_comparison(scores, TOKENS, 3, truth=truth, scopes={"good": "layer 3"})
    assert names(figure) == ["blanking out", "good, layer 3", "bad"]
    shown = drawn(figure)
    torch.testing.assert_close(shown[0], truth.double(), equal_nan=True)
    assert written(figure)[:4] == ["", "0.40", "0.20", "agrees"]  # 0.1 + 0.3, and 0.1 + 0.1
    assert "τ" not in written(figure)
    assert figure.axes[0].get_yticks()[1] > 1.2  # the truth stands apart


def test_agreement_is_the_overlap_of_shares() -> None:
    """Numbers computed by hand. Methods of a family are sorted by it; tau needs four clear entries of the truth."""
    nan = float("nan")
    truth = torch.tensor([nan, 0.6, 0.2, 0.1, 0.1])
    assert overlap(torch.tensor([0.0, 0.6, 0.2, 0.1, 0.1]), truth) == pytest.approx(1)
    assert overlap(torch.tensor([1.0, 0, 0, 0, 0]), truth) == 0  # what is not blanked out is no part of the truth
    assert overlap(torch.tensor([0.5, 0.3, 0.2, 0, 0]), truth) == pytest.approx(0.3 + 0.2)
    assert np.isnan(overlap(torch.ones(5), torch.zeros(5)))
    good, bad = torch.tensor([0.0, 0.5, 0.2, 0.2, 0.1]), torch.tensor([0.9, 0.1, 0, 0, 0])
    assert clear_tau(good, truth) == pytest.approx(kendall_tau(good, truth))
    assert np.isnan(clear_tau(good, torch.tensor([nan, 0.9, 0.1, 0.05, 0.009])))  # at most a hundredth of the largest
    scores = {"bad": bad, "joined": bad, "good": good}
    families = {"bad": "a", "good": "a", "joined": "b"}
    figure = draw_comparison(scores, list("abcde"), 0, truth=truth, families=families)
    assert names(figure) == ["blanking out", "good", "bad", "joined"]
    notes = [text for text in figure.axes[0].texts if text.get_text() in ("0.90", "0.10", "agrees", "τ")]
    assert [text.get_text() for text in notes] == ["0.90", "0.10", "0.10", "agrees", "τ"]
    assert notes[-1].get_color() != notes[0].get_color()
