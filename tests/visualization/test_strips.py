"""Strips of rows, routes through layers, bars over sounds, and patches over images."""

from itertools import combinations, product
from math import prod

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.functional import rollout
from captum_vz.functional.scores import kendall_tau, overlap
from captum_vz.visualization import describe, draw_audio, draw_comparison, draw_image, draw_route, draw_row, image_grid
from captum_vz.visualization.pictures.route import route_edges, strongest_paths
from captum_vz.visualization.pictures.rows import clear_tau
from tests.visualization import labels_of

TOKENS = ["[CLS]", "the", "cats", "[MASK]"]


def drawn(figure: Figure) -> torch.Tensor:
    """The rows from top to bottom."""
    images = sorted(figure.axes[0].images, key=lambda image: image.get_extent()[3])
    return torch.cat([torch.as_tensor(np.ma.filled(image.get_array(), np.nan)) for image in images])


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("form", ["tensor", "list", "maps"])
def test_rows_in_any_form(form: str) -> None:
    maps = torch.rand(3, 4, 4)
    given = {"tensor": maps[:, 3], "list": [row[None] for row in maps[:, 3]], "maps": list(maps[:, None])}[form]
    figure = draw_row(given, TOKENS, token=-1)
    torch.testing.assert_close(drawn(figure), maps[:, 3].double())
    assert labels_of(figure) == ["layer 0", "layer 1", "layer 2"]
    assert figure.get_suptitle() == "What [MASK] draws on"
    (mark,) = [patch for patch in figure.axes[0].patches if patch.get_linewidth() > 1]
    assert mark.get_x() == 2.5


def test_cells_and_row_options() -> None:
    figure = draw_row([torch.tensor([0.004, 0.25, 0.5, 1.0]), torch.tensor([0.0, -0.25, 0.0, 0.0])], TOKENS)
    assert written(figure) == [".25", ".50", "1.00", "-.25"]
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
    assert labels_of(figure) == ["blanking out", "good, layer 3", "bad"]
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
    assert labels_of(figure) == ["blanking out", "good", "bad", "joined"]
    notes = [text for text in figure.axes[0].texts if text.get_text() in ("0.90", "0.10", "agrees", "τ")]
    assert [text.get_text() for text in notes] == ["0.90", "0.10", "0.10", "agrees", "τ"]
    assert notes[-1].get_color() != notes[0].get_color()


# Routes


ABC = ["a", "b", "c"]


def maps(layers: int = 3, tokens: int = 3) -> list[Tensor]:
    return [torch.randn(tokens, tokens, dtype=torch.float64).mul(2).softmax(-1) for _ in range(layers)]


def all_paths(steps: list[Tensor], start: int) -> list[tuple[float, list[int]]]:
    """Every path to `start`, from the input up, the strongest first."""
    found = []
    for lower in product(range(len(steps[0])), repeat=len(steps)):
        path = [*lower, start]
        found.append((prod(float(step[path[i + 1], path[i]]) for i, step in enumerate(steps)), path))
    return sorted(found, reverse=True)


def test_paths_are_the_strongest_and_edges_their_sums() -> None:
    for _ in range(5):
        steps = maps()
        expected = all_paths(steps, 1)
        assert sum(share for share, _ in expected) == pytest.approx(1)
        found = strongest_paths(steps, 1, 7)
        assert [path for _, path in found] == [path for _, path in expected[:7]]
        assert [share for share, _ in found] == pytest.approx([share for share, _ in expected[:7]])
    assert strongest_paths(steps, 0, 0) == []
    assert len(strongest_paths(steps, 0, 99)) == 27
    edges = route_edges(steps, 1, 1e-12)
    assert len(edges) == 3 + 9 + 9
    for layer, i, j, share in edges:
        assert share == pytest.approx(sum(each for each, path in expected if path[layer : layer + 2] == [j, i]))
    rows = describe(draw_route(steps, ABC, 1, threshold=1e-12, residual=0.5)).rows
    lowest = torch.zeros(3, dtype=torch.float64)
    for layer, _, _, j, _, share in rows:
        lowest[j] += share if layer == 0 else 0
    torch.testing.assert_close(lowest, rollout([step[None] for step in steps], residual=0.5)[-1][0, 1])


def test_edges_are_connected_and_equal_steps_have_one_number() -> None:
    # A token that keeps 1.00 of itself in many layers has one number, with the count of layers.
    steps = [*maps(1), *[torch.eye(3, dtype=torch.float64)] * 30, *maps(1)]
    numbers = [text.get_text() for text in draw_route(steps, ABC, 0).axes[0].texts]
    assert len(numbers) == 3
    assert numbers[1] == "1.00 (30 layers)"
    steps = maps(5, 6)
    for threshold in (0.02, 0.1, 0.3):
        edges = route_edges(steps, 4, threshold)
        assert all(share >= threshold for *_, share in edges)
        for layer, i, _, _ in edges:
            assert i == 4 if layer == 4 else any(above == layer + 1 and i == j for above, _, j, _ in edges)


def test_figure_shows_the_route() -> None:
    first = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.3, 0.6]])
    second = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]])
    figure = draw_route([first, second[None]], ABC, token=2, threshold=0.1)
    panel = figure.axes[0]
    (line,) = [line for line in panel.lines if len(line.get_xdata()) == 3]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 1, 2], [0, 1, 2])
    assert [text.get_text() for text in panel.texts] == [".80", ".90"]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["input", "layer 0", "layer 1"]
    found = describe(figure)
    assert "The strongest path, from the input up, has 72%: b, b, c." in found.text
    assert found.rows[0] == (1, 2, "c", 1, "b", pytest.approx(0.9))
    assert len(found.rows) == 4  # c-b, c-c, b-b and b-a; c-c-c has .06, and so on


@pytest.mark.parametrize("tokens", [3, 11, 60])
def test_numbers_do_not_overprint(tokens: int) -> None:
    steps = maps(6, tokens)
    for paths in (2, 5):
        figure = draw_route(steps, [f"t{i}" for i in range(tokens)], 0, paths=paths, residual=0.5)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in figure.axes[0].texts]
        assert boxes
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


# Sounds and images


SOUND = torch.sin(torch.arange(32000) / 20)


def bars(figure: Figure) -> list[tuple[float, float, float]]:
    return [(patch.get_x(), patch.get_width(), patch.get_height()) for patch in figure.axes[0].patches]


def test_bars_fill_the_sound() -> None:
    figure = draw_audio(SOUND[None], torch.tensor([[0.1, 0.4, 0.2, 0.3]]), 16000, "share")
    found = bars(figure)
    assert [start for start, _, _ in found] == pytest.approx([0, 0.5, 1, 1.5])
    assert [width for _, width, _ in found] == pytest.approx([0.5] * 4)
    assert [height for _, _, height in found] == pytest.approx([0.25, 1, 0.5, 0.75])
    assert figure.axes[0].get_xlim() == (0, 2)
    assert figure.axes[0].get_ylabel() == "share"
    spans = [(0.1, 0.5), (0.6, 1.9)]
    figure = draw_audio(SOUND, torch.tensor([0.5, -0.25]), 16000, spans=spans, names=["the", "cats"], token=1)
    assert bars(figure) == [pytest.approx((0.1, 0.4, 1)), pytest.approx((0.6, 1.3, -0.5))]
    assert [text.get_text() for text in figure.axes[0].texts] == ["the", "cats"]
    told = describe(figure)
    assert told.rows[1] == (1, 0.6, 1.9, "cats", -0.25)
    assert told.text.startswith("A sound of 1.90 seconds with 2 scores. The largest are the 0.10 to 0.50 s 0.50")


@pytest.mark.parametrize("before", [0, 1, 5])
def test_patches_become_pixels(before: int) -> None:
    patches = torch.rand(6)  # two lines of three
    image = torch.rand(3, 8, 12)
    scores, pixels = image_grid(torch.cat([torch.full((before,), 9.0), patches]), image)
    assert scores.shape == (8, 12, 1)
    for down in range(8):
        for across in range(12):
            assert scores[down, across, 0] == float(patches[down // 4 * 3 + across // 4])
    np.testing.assert_array_equal(pixels, image.permute(1, 2, 0).double())


def test_usual_images_and_pixels() -> None:
    for count in (197, 198, 201):  # ViT, DeiT, DINOv2 with registers
        scores, _ = image_grid(torch.rand(1, count), torch.rand(1, 3, 224, 224))
        assert len(np.unique(scores)) == 196
    normalized = torch.randn(3, 4, 4)
    _, pixels = image_grid(torch.rand(4), normalized)
    assert (pixels.min(), pixels.max()) == (0, 1)
    _, whole = image_grid(torch.rand(4), np.full((4, 4, 3), 255, dtype=np.uint8))
    assert (whole == 1).all()


def test_layers_over_an_image() -> None:
    """Each panel has the scores of its layer's patches over the image. Tokens before the patches are left out."""
    rows = torch.rand(3, 2 + 12).softmax(-1)
    figure = draw_image(rows, torch.rand(3, 30, 40), token=3)
    assert [panel.get_title() for panel in figure.axes[:4]] == ["image", "layer 0", "layer 1", "layer 2"]
    for layer in range(3):
        below, scores = figure.axes[layer + 1].images
        np.testing.assert_allclose(scores.get_array(), rows[layer, 2:].view(3, 4).double())
        assert scores.get_extent() == [-0.5, 39.5, 29.5, -0.5] and below.get_array().shape == (30, 40)
        strength = np.asarray(scores.get_alpha())
        assert strength.argmax() == rows[layer, 2:].argmax() and strength.min() >= 0
        (frame,) = figure.axes[layer + 1].patches  # patch 1: the second of the first row
        assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (9.5, -0.5, 10, 10)
    found = describe(figure)
    assert found.columns == ("panel", "row", "column", "share of the row")
    assert found.rows[5] == ("layer 0", 1, 1, rows[0, 7].double().item())


def test_maps_over_an_image() -> None:
    """A row of whole maps is taken. A rollout ends at its own largest score."""
    maps = {"layer 0": torch.eye(17), "rollout": torch.full((1, 17, 17), 1 / 17)}
    figure = draw_image(maps, torch.rand(1, 8, 8), token=2)
    assert figure.axes[1].images[1].get_array()[0, 1] == 1
    assert figure.axes[2].get_title() == "rollout (to 0.059)"
    signed = draw_image([torch.tensor([0.0, 1.0, -1.0, 0.0, 0.5])], torch.rand(3, 4, 4)).axes[1].images[1]
    np.testing.assert_allclose(np.asarray(signed.get_alpha()), [[0.9, 0.9], [0, 0.45]])
    red, _, blue, _ = signed.cmap(signed.norm(-1.0))
    assert red > blue
    assert describe(draw_image(maps, torch.rand(3, 8, 8), token=0, title="A title")).text.startswith("A title.")
