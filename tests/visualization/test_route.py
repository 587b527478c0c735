"""Routes: shares of edges and paths, computed a second time by listing all paths."""

from itertools import combinations, product
from math import prod

import pytest
import torch
from torch import Tensor

from captum_vz.functional import rollout
from captum_vz.visualization import describe, draw_route
from captum_vz.visualization.pictures.route import route_edges, strongest_paths

TOKENS = ["a", "b", "c"]


def maps(layers: int = 3, tokens: int = 3) -> list[Tensor]:
    return [torch.randn(tokens, tokens, dtype=torch.float64).mul(2).softmax(-1) for _ in range(layers)]


def all_paths(steps: list[Tensor], start: int) -> list[tuple[float, list[int]]]:
    """Every path to `start`, from the input up, the strongest first."""
    found = []
    for lower in product(range(len(steps[0])), repeat=len(steps)):
        path = [*lower, start]
        found.append((prod(float(step[path[i + 1], path[i]]) for i, step in enumerate(steps)), path))
    return sorted(found, reverse=True)


def test_paths_are_the_strongest() -> None:
    for _ in range(5):
        steps = maps()
        expected = all_paths(steps, 1)
        assert sum(share for share, _ in expected) == pytest.approx(1)
        found = strongest_paths(steps, 1, 7)
        assert [path for _, path in found] == [path for _, path in expected[:7]]
        assert [share for share, _ in found] == pytest.approx([share for share, _ in expected[:7]])
    assert strongest_paths(steps, 0, 0) == []
    assert len(strongest_paths(steps, 0, 99)) == 27


def test_edges_are_sums_of_paths() -> None:
    steps = maps()
    paths = all_paths(steps, 2)
    edges = route_edges(steps, 2, 1e-12)
    assert len(edges) == 3 + 9 + 9
    for layer, i, j, share in edges:
        assert share == pytest.approx(sum(each for each, path in paths if path[layer : layer + 2] == [j, i]))
    rows = describe(draw_route(steps, TOKENS, 2, threshold=1e-12, residual=0.5)).rows
    lowest = torch.zeros(3, dtype=torch.float64)
    for layer, _, _, j, _, share in rows:
        lowest[j] += share if layer == 0 else 0
    torch.testing.assert_close(lowest, rollout([step[None] for step in steps], residual=0.5)[-1][0, 2])


def test_edges_are_thresholded_and_connected() -> None:
    steps = maps(5, 6)
    for threshold in (0.02, 0.1, 0.3):
        edges = route_edges(steps, 4, threshold)
        assert all(share >= threshold for *_, share in edges)
        for layer, i, _, _ in edges:
            assert i == 4 if layer == 4 else any(above == layer + 1 and i == j for above, _, j, _ in edges)


def test_figure_shows_the_route() -> None:
    first = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.3, 0.6]])
    second = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]])
    figure = draw_route([first, second[None]], TOKENS, token=2, threshold=0.1)
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


def test_equal_steps_have_one_number() -> None:
    """A token that keeps 1.00 of itself in many layers has one number, with the count of layers."""
    steps = [*maps(1), *[torch.eye(3, dtype=torch.float64)] * 30, *maps(1)]
    numbers = [text.get_text() for text in draw_route(steps, TOKENS, 0).axes[0].texts]
    assert len(numbers) == 3
    assert numbers[1] == "1.00 (30 layers)"
