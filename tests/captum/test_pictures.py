"""What Captum draws takes our maps as they are, and shows their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from captum.attr import LayerAttribution, LLMAttributionResult, visualization

from tests.captum.configurations import LAYER_METHODS, METHODS, Configuration, tensors

each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


class Marks(HTMLParser):
    """The coloured words of an HTML page, with the lightness of their colours in per cent."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.lightness: list[int] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "mark":
            self.inside = True
            self.words.append("")
            self.lightness.append(int(re.search(r"(\d+)%\);", str(dict(attrs)["style"]))[1]))

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "mark"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.words[-1] += data.strip()


@each_method
def test_visualize_text_colours_each_token(method: Any) -> None:
    row = tensors(Configuration(method).run(token=2))[0][0]
    tokens = [f"token{place}" for place in range(len(row))]
    record = visualization.VisualizationDataRecord(row, 0.9, 1, 1, "token2", row.sum(), tokens, 0.0)
    marks = Marks(visualization.visualize_text([record]).data)
    assert marks.words == tokens
    assert marks.lightness == [100 - int(50 * score) for score in row.tolist()]


@pytest.mark.parametrize("way", ["heat_map", "blended_heat_map", "masked_image", "alpha_scaling"])
@each_method
def test_visualize_image_attr_draws_cls(method: Any, way: str) -> None:
    configuration = Configuration(method, "vit", layers=2 if method in LAYER_METHODS else None)
    image = configuration.case.inputs["pixel_values"][0].permute(1, 2, 0).numpy()  # (8, 8, 3), four patches
    row = configuration.run(token=0)[:1]  # what [CLS], the first token, draws on
    patches = row[:, 1:].reshape(1, 1, 2, 2)
    attributions = LayerAttribution.interpolate(patches, (8, 8))[0].permute(1, 2, 0).numpy()
    figure, axes = visualization.visualize_image_attr(
        attributions,
        original_image=(image - image.min()) / (image.max() - image.min()),
        method=way,
        sign="positive",
        outlier_perc=1e-3,
        use_pyplot=False,
    )
    figure.canvas.draw()
    (drawn,) = axes.images[-1:]
    assert drawn.get_array().shape[:2] == (8, 8)
    if way == "heat_map":
        corners = torch.tensor(drawn.get_array()[::4, ::4])  # one pixel a patch
        torch.testing.assert_close(corners, patches[0, 0] / patches.max(), rtol=1e-6, atol=0)


@each_method
def test_plots_of_tokens(method: Any) -> None:
    configuration = Configuration(method, "gpt2", layers=1 if method in LAYER_METHODS else None)
    square = configuration.run()[0]
    tokens = [f"token{place}" for place in range(len(square))]
    result = LLMAttributionResult(input_tokens=tokens, output_tokens=tokens, seq_attr=square[2], token_attr=square)
    figure, axes = result.plot_token_attr(show=False)
    figure.canvas.draw()
    torch.testing.assert_close(torch.tensor(axes.images[0].get_array()), square)
    written = [text.get_text() for text in axes.texts]
    assert written == [f"{score:.4f}" for score in square.flatten().tolist()]
    assert [label.get_text() for label in axes.get_xticklabels()] == tokens
    # Causal: what stands above the diagonal is nothing at all.
    assert {written[i * len(tokens) + j] for i in range(len(tokens)) for j in range(i + 1, len(tokens))} == {"0.0000"}
    figure, axes = result.plot_seq_attr()
    figure.canvas.draw()
    # Two bars a token, one for what is positive and one for what is negative.
    heights = torch.tensor([bar.get_height() for bar in axes.patches], dtype=square.dtype).unflatten(0, (2, -1))
    torch.testing.assert_close(heights.sum(0), square[2], rtol=1e-6, atol=1e-8)
